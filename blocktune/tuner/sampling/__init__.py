"""The search as an Optuna study: parameters, samplers of our own, the race as a pruner, and asking and telling."""
