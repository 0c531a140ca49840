"""What becomes of a row, where an operation has kernels of its own: all of them in its file."""
