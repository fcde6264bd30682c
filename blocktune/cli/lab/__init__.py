"""Commands that judge the search itself."""
