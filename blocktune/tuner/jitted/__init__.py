"""Kernels of other people compiled: for a call before it is launched, or for a GPU that is not here."""
