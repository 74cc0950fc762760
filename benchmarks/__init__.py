"""Speed benchmarks: each module measures expertctl and a rival in turns, in one process tree."""
