"""Instruments for judging the search itself: recorded sweeps, replay, noise, calibration."""
