"""What commands and production get from outside: damaged files, files without an end, variables, and passwords."""
