"""PyTorch's attention ops, computed by our kernels for as long as a program has the provider `blocktune` active."""

PROVIDER = "blocktune"
"""The name of our implementation in PyTorch's registry."""
