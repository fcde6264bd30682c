"""The imports of production: from a call of `attention` to the config that serves it, and its launch."""
