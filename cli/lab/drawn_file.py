"""What `python -m tests.support.programs.drawn_shapes` keeps, and the table that is made of it."""



SUFFIX = ".drawn.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-drawn", 1
FEW_QUERIES = 16
COLUMNS = ("shape", "untuned", "tuned", "untuned over fastest", "seconds")
