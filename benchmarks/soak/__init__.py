"""The parts of ``benchmarks.serving_soak``: a home, its callers, its changes, its watch."""
