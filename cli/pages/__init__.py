"""Writes measured tables into README.md and docs/."""
