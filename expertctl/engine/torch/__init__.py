"""Everything that needs torch: CUDA, other architectures, and plain formulas as test oracles."""
