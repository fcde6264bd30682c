"""Shapes drawn by a seed, what a call gets untuned on a GPU, and what every peer takes for the same."""
