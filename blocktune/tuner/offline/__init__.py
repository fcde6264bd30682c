"""What a launch of an autotuned kernel compiles, and its code without a launch."""
