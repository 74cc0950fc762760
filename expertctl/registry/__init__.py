"""The client of registries: addresses, credentials, transport, and the signed index."""
