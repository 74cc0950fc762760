"""What is installed on this machine: packages, base models, the catalogue."""
