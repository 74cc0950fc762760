"""Calls of tools in the text that a model writes: the formats of models, and their content."""
