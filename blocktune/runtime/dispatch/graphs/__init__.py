"""Calls in compiled and exported graphs: the ops that stand for them."""
