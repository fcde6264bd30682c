"""@tuned: user-written functions with searched parameters."""
