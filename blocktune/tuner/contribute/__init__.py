"""Contributions of a GPU to those who do not have it: checks, compiled code, noise and times of fixed shapes."""
