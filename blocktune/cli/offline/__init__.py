"""Kernels of others, compiled without a GPU: by their name, or as a program launches them."""
