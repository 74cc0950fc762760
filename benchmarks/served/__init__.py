"""The parts of ``benchmarks.serving``: the server, and what is measured of it besides a batch."""
