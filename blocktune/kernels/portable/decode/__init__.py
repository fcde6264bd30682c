"""Split-KV decoding in ordinary Triton."""
