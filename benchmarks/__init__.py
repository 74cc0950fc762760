"""Speed as a feature: each module measures ours and a rival, alternating, in one process tree."""
