"""Measured results that ship with the package, one JSON file a device."""
