"""Commands that search or time: run, bench."""
