"""Kernels in ordinary Triton, for every GPU that Triton knows."""
