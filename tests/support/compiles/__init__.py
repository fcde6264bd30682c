"""What compiled kernels are like, remembered so that only kernels that changed are compiled."""
