"""Benchmarks run the same kernels as the engine's tests, compiled once for both."""

from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]
