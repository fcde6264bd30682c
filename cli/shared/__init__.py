"""Flags, output and progress that several commands share."""
