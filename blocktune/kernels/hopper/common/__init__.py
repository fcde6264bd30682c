"""Device functions and tensor descriptors that the Hopper kernels share."""
