"""Programs that time: kernels and searches on a GPU, entry points on the host, pages in a browser."""
