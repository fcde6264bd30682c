"""Which config to try next, when to stop, and who wins: the use case tune()."""
