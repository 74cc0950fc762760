"""The CPU backend: packed base weights and the decoder that runs on compiled kernels."""
