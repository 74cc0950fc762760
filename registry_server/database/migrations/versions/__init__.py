"""One module a step; each says which one comes before it."""
