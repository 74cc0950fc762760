"""A registry on a socket of this machine: the real application under a real server, in a thread."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import uvicorn
from starlette.types import ASGIApp

from tests.registry_server.served import Served, new_registry, new_settings


@dataclass(frozen=True)
class Live:
    """A registry that answers on its URL until the context ends."""

    served: Served
    url: str

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")


class _Server(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def as_it_is(app: ASGIApp) -> ASGIApp:
    """Put nothing around the application."""
    return app


@contextmanager
def live_registry(
    folder: Path, *, around: Callable[[ASGIApp], ASGIApp] = as_it_is, **limits: float
) -> Iterator[Live]:
    """Make a registry in a new folder and serve it, with a test around it, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        served = new_registry(replace(new_settings(folder, **limits), port=port))
        config = uvicorn.Config(
            around(served.app), log_config=None, lifespan="off", access_log=False
        )
        server = _Server(config)
        thread = Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert server.listening.wait(120)
        try:
            yield Live(served, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join(120)
            served.close()
