"""Profiles of a config and a device by counters, machine code and measured ceilings, next to predictions."""
