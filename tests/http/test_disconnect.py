"""What is done for a client ends with it, and what it raises reaches who called."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from expertctl.errors import UsageError
from expertctl.http.limits import run_until_disconnect


async def there() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("it never leaves")


async def gone() -> Message:
    return {"type": "http.disconnect"}


def test_work_that_ends_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert asyncio.run(run_until_disconnect(there, work())) == 7


def test_work_that_fails_raises_what_it_raised() -> None:
    async def work() -> int:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        asyncio.run(run_until_disconnect(there, work()))


def test_work_for_who_is_gone_is_at_its_end_when_that_is_told() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def ask() -> None:
        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(gone, work())
        assert ended == ["work"]

    asyncio.run(ask())


def test_who_waits_may_be_cancelled_too() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def ask() -> None:
        waiting = asyncio.ensure_future(run_until_disconnect(there, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["work"]

    asyncio.run(ask())
