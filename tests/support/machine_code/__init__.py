"""What the compiler made of a kernel, and what is legal in it."""
