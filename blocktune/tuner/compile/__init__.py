"""Compiling configs in worker processes and reading what they use."""
