"""The Hopper backward under a block mask: the kernels of `backward`, which lists tell what to walk."""
