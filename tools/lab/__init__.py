"""Studies of the cost model, of other devices and of fleets: programs that no command needs."""
