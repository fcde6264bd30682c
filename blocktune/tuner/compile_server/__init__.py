"""The process that compiles: it imports kernels once, and forks a worker for each compile that runs at a time."""
