"""Plans of calls, and how their launches are recorded and repeated."""
