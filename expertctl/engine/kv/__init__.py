"""Attention keys and values: contiguous and paged caches, and the prefix cache."""
