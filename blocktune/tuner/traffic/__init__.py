"""How many bytes each kernel moves between device memory and the chip."""
