"""Decoding over 8-bit caches on Hopper in one launch."""
