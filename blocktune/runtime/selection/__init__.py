"""Which stored config a shape gets, why, and which shapes had none."""
