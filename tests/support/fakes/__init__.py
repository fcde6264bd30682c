"""Stand-ins for kernels, devices, drivers, compilers and GPUs."""
