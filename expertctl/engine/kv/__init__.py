"""Attention keys and values: what caches have in common, paged caches, and the prefix cache."""
