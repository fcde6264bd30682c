"""Timing on a GPU: the protocol, the worker process, and the state of the GPU."""
