"""Many searches on the GPUs of one host, and what a cluster shares with it."""
