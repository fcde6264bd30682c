"""Recovery of a damaged store: its pages, its records, and a fresh store made of them."""
