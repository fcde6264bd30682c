"""What makes scores more than products, and what drops probabilities, in the Hopper forward and backward."""
