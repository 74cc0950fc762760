"""A server on a socket, as a program: ``socket_program.py HOME ROWS QUEUE`` prints its port."""

import sys
from pathlib import Path

from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.http.server import ListenAddress
from expertctl.server.serve import serve
from expertctl.server.settings import ServeSettings
from expertctl.settings import Home, Settings
from tests.server.harness import BASE


def print_port(address: ListenAddress) -> None:
    print(address.port, flush=True)


def main(home: str, rows: str, queue: str) -> None:
    batch = EngineConfig(
        base=BASE, memory_budget=64 << 20, batching=BatchingConfig(rows=int(rows), queue=int(queue))
    )
    settings = Settings(Home(Path(home)), encoder="lexical")
    serve(ServeSettings(port=0, engine=batch), settings, report=print_port)


if __name__ == "__main__":
    main(*sys.argv[1:])
