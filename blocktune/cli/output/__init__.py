"""The output of commands: tables, JSON, progress, and how winners look."""
