"""The distribution of blocks over ranks, and the fastest schedule: arithmetic that needs neither GPU nor ranks."""
