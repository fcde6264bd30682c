"""Stores for tests: new, old, filled, large and damaged ones, and servers."""
