"""Results as documents: export, import, merge, compare."""
