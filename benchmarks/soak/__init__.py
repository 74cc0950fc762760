"""The parts of ``benchmarks.serving_soak``: a home, its callers, who changes it, who looks on."""
