"""Compilation of an autotuned kernel without a launch."""
