"""Programs of several ranks or nodes: attention that they share, and searches on a Ray cluster."""
