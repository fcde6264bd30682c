"""Reports and live pages as a reader gets them."""
