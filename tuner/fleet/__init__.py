"""Many searches on many GPUs."""
