"""Memory of the engine: budget, adapter cache, eviction, prefetch, and process admission."""
