"""How measuring is decided: space, resources, occupancy, cost model, bench and search."""
