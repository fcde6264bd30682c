"""What a config compiles to: its code here, what it uses, and what is remembered or shipped of it."""
