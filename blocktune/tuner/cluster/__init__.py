"""Many searches on a Ray cluster."""
