"""Decoding on Hopper in one launch."""
