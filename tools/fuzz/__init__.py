"""Fuzzers with a corpus, guided by coverage: one for each parser of what strangers may have written."""
