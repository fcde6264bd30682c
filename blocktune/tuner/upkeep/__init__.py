"""Keeping stored winners true: re-timing, merging neighbouring shapes, agreement of searches."""
