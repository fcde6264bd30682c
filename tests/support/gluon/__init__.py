"""Gluon kernels on the CPU: their own source, with stand-ins for what the GPU does."""
