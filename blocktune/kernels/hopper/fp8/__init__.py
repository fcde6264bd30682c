"""The 8-bit Hopper forward kernel."""
