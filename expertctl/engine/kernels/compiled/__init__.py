"""What is imported only to compile kernels: numba, and the Python code that it compiles."""
