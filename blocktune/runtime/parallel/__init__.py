"""Attention over several GPUs: each rank holds a part of the sequence."""
