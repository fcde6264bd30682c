"""Flags and look-ups that several commands share."""
