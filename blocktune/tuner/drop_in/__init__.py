"""Tuning of kernels of other people: what happens when an autotuned kernel is called and no config is known."""
