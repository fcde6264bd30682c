"""What commands print: tables, JSON, progress, and how winners look."""
