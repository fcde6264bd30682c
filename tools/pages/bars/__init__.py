"""The page of bars: what each kind of attention is to reach, what was measured, and what falls short."""
