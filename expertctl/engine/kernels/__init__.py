"""Compiled code for CPUs: kernels, the programs they make up, and the crew that runs them."""
