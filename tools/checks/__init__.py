"""Programs that check kernels: machine code, memory and races, counters, special values, head dimensions."""
