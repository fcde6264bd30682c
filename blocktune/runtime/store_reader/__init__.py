"""What production reads from disk: stored configs, where they come from and what they are worth."""
