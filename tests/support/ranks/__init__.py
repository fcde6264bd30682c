"""Ranks that share attention or a search: their calls, what each must find, and how they are timed."""
