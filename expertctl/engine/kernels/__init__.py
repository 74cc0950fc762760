"""Compiled CPU kernels, programs built from them, and the thread pool that runs programs."""
