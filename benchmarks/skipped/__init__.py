"""What the benchmark of skipped experts is made of: bases in little memory, readings, a picture."""
