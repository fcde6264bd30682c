"""`tune report`: one HTML file with everything that was measured, opened without a network."""
