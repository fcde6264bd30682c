"""Workers that stand in for those of a search."""
