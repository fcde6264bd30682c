"""Measurements as frozen values, with its bounds and its rows."""
