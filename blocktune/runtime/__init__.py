"""What production imports: from a call of `attention` to the config that serves it, and its launch."""
