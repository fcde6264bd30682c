"""Decoding over 8-bit caches on Hopper with many rows: keys and values go through a ring of shared memory."""
