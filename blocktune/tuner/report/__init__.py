"""The tables that a report shows: measurements as they were recorded, and what the models say next to them."""
