"""What a search may try: the shape, the space of configs, and the configs that come first."""
