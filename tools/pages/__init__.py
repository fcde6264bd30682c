"""Writes what is generated into README.md and docs/: tables, pictures, the commands and their output."""
