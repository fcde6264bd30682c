"""What fits on a multiprocessor, what limits it, and what would lift the limit."""
