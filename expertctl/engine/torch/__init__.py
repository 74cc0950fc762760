"""Everything that needs torch: plans as tensors, and the plain formulas that tests compare with."""
