"""The Hopper forward kernels, for long and for short sequences."""
