"""Configs of one call timed in turns: here or in a child process, with hooks, until one has won."""
