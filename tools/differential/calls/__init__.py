"""Calls of the drawn cases: of each function, with the problem that each solves."""
