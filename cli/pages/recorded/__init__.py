"""Tables of files in results/ other than benches: a module for each kind of file."""
