"""The attention kernels and the values that describe them: shapes, configs, devices."""
