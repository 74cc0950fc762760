"""Keys, signatures and who may sign what. Knows nothing of packages or the store."""
