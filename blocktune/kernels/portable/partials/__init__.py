"""Attention over some of the keys, added to attention over others."""
