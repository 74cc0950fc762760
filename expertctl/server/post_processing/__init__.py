"""Checks of whole answers against the requested response format."""
