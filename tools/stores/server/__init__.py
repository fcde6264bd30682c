"""A PostgreSQL store under fire: its server, its disk, the network to it, and clients of two versions."""
