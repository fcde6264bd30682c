"""Programs that launch autotuned kernels: those of libraries, and by many processes at once."""
