"""Kernels in Gluon for compute capability 9.0."""
