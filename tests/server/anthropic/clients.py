"""The official client, on a server in process or on a socket."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2

from tests.server.served import URL, Served

_ROOT = Path(__file__).parents[3]
_PROGRAM = "tests.server.anthropic.socket_program"


@contextmanager
def a_client(served: Served, secret: str = "any") -> Iterator[anthropic.Anthropic]:
    """The client of a server in process; it tries nothing again."""
    inner: Any = served.client()
    with anthropic.Anthropic(
        api_key=secret, base_url=URL, http_client=inner, max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def an_async_client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The asynchronous client of a server in process."""
    transport = httpx2.ASGITransport(app=served.app)
    async with (
        httpx2.AsyncClient(transport=transport, base_url=URL) as inner,
        anthropic.AsyncAnthropic(
            api_key="any", base_url=URL, http_client=inner, max_retries=0
        ) as client,
    ):
        yield client


@contextmanager
def on_a_socket(home: Path, *, rows: int = 16, queue: int = 128) -> Iterator[str]:
    """Serve a home in a process of its own; give the address."""
    command = [sys.executable, "-m", _PROGRAM, str(home), str(rows), str(queue)]
    log = home.parent / f"{home.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
    assert process.stdout
    try:
        port = process.stdout.readline().strip()
        assert port, log.read_text()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
