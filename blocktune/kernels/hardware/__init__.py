"""What a GPU can hold and how fast it is: the driver, NVML, limits of compute capabilities, and the catalogue."""
