"""The attention kernels, the values that describe them, and the dispatcher that runs them."""
