"""The candidates of a search: the shape, the space of configs, and the configs that come first."""
