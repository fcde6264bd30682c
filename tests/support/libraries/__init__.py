"""Autotuned kernels, of libraries and as libraries have them, and what is measured of them."""
