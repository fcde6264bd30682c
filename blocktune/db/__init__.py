"""What was measured: records, schema and store."""
