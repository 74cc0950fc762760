"""The check of a GPU machine: packages, parts and report of ``scripts/gpu_check``."""
