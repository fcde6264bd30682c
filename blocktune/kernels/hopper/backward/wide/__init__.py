"""The backward of a head_dim over 128: both warpgroups on the same keys, or half of 128 keys each."""
