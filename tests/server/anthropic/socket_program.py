"""A server on a socket, as a program: ``socket_program.py HOME ROWS QUEUE`` prints its port."""

import sys
from pathlib import Path

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.http.listening import Listening
from expertctl.server.serve import serve
from expertctl.server.settings import ServeSettings
from expertctl.settings import Home, Settings
from tests.server.served import BASE


def report(address: Listening) -> None:
    print(address.port, flush=True)


def main(home: str, rows: str, queue: str) -> None:
    batch = BatchSettings(base=BASE, budget=64 << 20, rows=int(rows), queue=int(queue))
    settings = Settings(Home(Path(home)), encoder="lexical")
    serve(ServeSettings(port=0, batch=batch), settings, report=report)


if __name__ == "__main__":
    main(*sys.argv[1:])
