"""The Hopper forward for short sequences."""
