"""The server that clients are tried against: the real one, in process."""

from tests.server.conftest import make_served, served, stock

__all__ = ["make_served", "served", "stock"]
