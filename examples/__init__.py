"""Worked examples that ship beside the library; nothing in the library imports them."""
