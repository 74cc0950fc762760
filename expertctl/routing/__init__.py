"""From a prompt to a plan: features, candidates, scores, reasons."""
