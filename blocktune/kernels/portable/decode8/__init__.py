"""Split-KV decoding over caches of 8-bit keys and values in ordinary Triton."""
