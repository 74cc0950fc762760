"""What the benchmark of routed experts is made of: bases, readers, rivals, processes."""
