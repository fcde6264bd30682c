"""Tables of measurements in results/ other than benches: a module for each kind of file."""
