"""The tasks of the starter pack, one module each."""
