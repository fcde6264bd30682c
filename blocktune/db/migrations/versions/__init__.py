"""One module a schema version."""
