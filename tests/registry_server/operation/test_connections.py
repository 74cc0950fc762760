"""Many connections that say nothing do not keep others out."""

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertctl.http.server import MAX_CONNECTIONS, raise_file_limit
from tests.registry_server.operation.server_process import init_registry_folder, run_server

SILENT = 1100
"""More than granian holds by default."""


@pytest.fixture
def open_files() -> Iterator[tuple[int, int]]:
    """The limits of this process, which are what they were afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised_and_never_lowered(open_files: tuple[int, int]) -> None:
    _, hard = open_files
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_file_limit()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised[0] >= min(MAX_CONNECTIONS, raised[1])
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


def test_silent_connections_do_not_keep_others_out(
    tmp_path: Path, open_files: tuple[int, int]
) -> None:
    raise_file_limit()
    init_registry_folder(tmp_path / "registry")
    with run_server(tmp_path / "registry") as server, ExitStack() as stack:
        silent = [stack.enter_context(server.socket()) for _ in range(SILENT)]
        for client in silent:
            client.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert server.get("/healthz")[0] == 200
        silent[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # answered before any of them had to go
            silent[0].recv(1)
