"""The page of targets: what each kind of attention is to reach, what was measured, and what falls short."""
