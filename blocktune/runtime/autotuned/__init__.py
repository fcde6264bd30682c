"""Kernels of other people under `@triton.autotune`: what a call is known by, and which stored config serves it."""
