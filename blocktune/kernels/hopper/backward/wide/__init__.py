"""The backward of heads wider than 128 columns: both warpgroups on the same keys, or half of 128 keys each."""
