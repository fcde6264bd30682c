"""The files that production reads: stored configs, where they come from and what they are worth."""
