"""What is right: attention by its definition, how far from it rounding may be, and planted faults."""
