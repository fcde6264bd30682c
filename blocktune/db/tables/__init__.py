"""The database: connections, tables, schema versions, upkeep."""
