"""Portable forward kernels, dense and block-sparse."""
