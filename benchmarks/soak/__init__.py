"""The parts of ``benchmarks.serving_soak``: a home, its clients, its changes, its monitor."""
