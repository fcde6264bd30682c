"""Programs that launch Triton kernels, run without a GPU: what each launch compiles to for a device."""
