"""The command line: words in, tables and JSON out."""
