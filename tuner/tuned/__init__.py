"""Tuning of user-written functions."""
