"""Kernels that are kept for comparison; they compete only when they are named."""
