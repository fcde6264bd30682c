"""The values that describe a call, their errors, and the reference that defines attention."""
