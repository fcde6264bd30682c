"""Who computes what with which keys, and which way is fastest: arithmetic that needs neither GPU nor ranks."""
