"""The parts of the benchmark of skipped experts: bases in little memory, evaluation, a plot."""
