"""What is on this machine: verified packages, base models, the catalogue."""
