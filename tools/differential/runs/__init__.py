"""Running the calls: in workers that may die, under the circumstances of each, and what is reported of them."""
