"""Where the threads of a block hold a tile, and the shared memory through which it changes hands."""
