"""Occupancy: the blocks that fit on a multiprocessor, their limit, and the changes that would lift it."""
