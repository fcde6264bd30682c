"""Fastest block sizes for Triton attention, found, explained, kept and dispatched."""
