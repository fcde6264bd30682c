"""The compilation of a config: its code here, its resources, and the results that are remembered or shipped."""
