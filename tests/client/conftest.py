"""The server that clients are tried against: the real one, in process."""

from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder
from tests.server.conftest import make_served, served, stock

__all__ = ["keeps_all_code", "keeps_code", "kept_folder", "make_served", "served", "stock"]
