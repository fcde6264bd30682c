"""Commands about stored results."""
