"""Programs that time: kernels and searches on a GPU, pages in a browser."""
