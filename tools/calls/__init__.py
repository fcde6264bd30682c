"""What calls cost on the host: their parts without a GPU, and their times on one."""
