"""Calls of attention for tests: problems, what is right for them, and what their launches cost."""
