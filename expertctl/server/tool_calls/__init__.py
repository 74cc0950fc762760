"""Calls of tools in the text that a model writes: its own spelling of them, and what they say."""
