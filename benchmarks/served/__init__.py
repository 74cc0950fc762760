"""The parts of ``benchmarks.serving``: the server, and all measurements except the batch."""
