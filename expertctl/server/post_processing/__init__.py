"""Checks whether a whole answer has the form that the request asks for."""
