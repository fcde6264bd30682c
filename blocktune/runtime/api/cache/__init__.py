"""The rows in a cache of keys and values: where they are, how new ones get in, and their rotation."""
