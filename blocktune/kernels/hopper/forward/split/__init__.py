"""The Hopper forward over parts of the keys."""
