"""Measurements: records, schema and store."""
