"""Portable backward kernels, dense and block-sparse."""
