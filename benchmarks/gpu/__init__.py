"""The check of a GPU machine, its packages, parts and page: ``scripts/gpu_check``."""
