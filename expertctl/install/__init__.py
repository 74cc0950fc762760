"""From a reference or a file to a stored expert, with everything it requires."""
