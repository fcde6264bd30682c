"""Drawn calls of `attention` timed next to the kernel that PyTorch chooses for the same call."""
