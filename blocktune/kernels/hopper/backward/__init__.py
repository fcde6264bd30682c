"""The Hopper backward kernel, for narrow and for wide heads."""
