"""Checks and times our attention under transformers and diffusers, on a GPU."""
