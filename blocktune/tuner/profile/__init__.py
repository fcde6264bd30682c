"""What a config and a device really do, by counters, machine code and measured ceilings, next to what models say."""
