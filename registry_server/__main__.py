"""``python -m registry_server DIR``: serve a registry, as ``expertctl registry serve`` does."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from expertctl.errors import ExpertError
from expertctl.http.server import ListenAddress
from registry_server.operation.serve import serve
from registry_server.settings import override_settings, read_settings


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    given = _build_parser().parse_args(arguments)
    try:
        settings = override_settings(
            read_settings(given.data),
            host=given.host,
            port=given.port,
            certificate=given.tls_cert,
            private_key=given.tls_key,
        )
        serve(settings, workers=given.workers, insecure=given.insecure_http, report=_print_address)
    except ExpertError as error:
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {error.message}{hint}\n")
        return 1
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m registry_server", description=__doc__)
    parser.add_argument("data", type=Path, metavar="DIR", help="the data folder")
    parser.add_argument("--host", help="the address to listen on")
    parser.add_argument("--port", type=int, help="0 chooses a free port")
    parser.add_argument("--workers", type=int, default=1, help="number of worker processes")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    parser.add_argument("--insecure-http", action="store_true", help="allow clear text to others")
    return parser


def _print_address(address: ListenAddress) -> None:
    sys.stderr.write(f"listening on {address.url}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
