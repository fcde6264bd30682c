"""Programs that use a store, many at once, and programs under which it, its disk or its server fails."""


class Unavailable(Exception):
    """A part that this machine cannot try."""
