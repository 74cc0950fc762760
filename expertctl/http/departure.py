"""Clients that go away: what is done for them ends at once."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_Result = TypeVar("_Result")


async def until_left(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Do something as long as the client is there; its body must have been read.

    Raises:
        ClientDisconnect: when it went away first; ``work`` was cancelled and is at its end.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
