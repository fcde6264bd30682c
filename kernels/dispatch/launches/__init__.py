"""Launches of calls with features, log-sum-exp or gradients, and how they are recorded and repeated."""
