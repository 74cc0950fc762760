"""The parts of the benchmark of routed experts: bases, readers, rivals, processes."""
