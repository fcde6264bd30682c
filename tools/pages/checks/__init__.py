"""Tables of what checks found: the differential check, faults, GPU tests, the sanitizer."""
