"""How long a config should take and why: the cost model, the roofline, and their explanation."""
