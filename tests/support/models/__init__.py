"""What the models of occupancy and traffic are compared with, and a landscape of times to search in."""
