"""Many jobs on one base at a time, each row of a batch with a plan of its own."""
