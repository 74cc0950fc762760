"""How a server ends when signals come together, early, late, or to all of its processes."""

import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest

from registry_server.operation.new_registry import CreatedRegistry
from registry_server.registry import BlobDigest, open_registry
from tests.registry_server.harness import open_harness
from tests.registry_server.oci.images import compute_digest, random_bytes
from tests.registry_server.operation.server_process import (
    ServerProcess,
    init_registry_folder,
    run_server,
    start_server,
)
from tests.registry_server.operation.test_serve import await_refusal

pytestmark = pytest.mark.all

ROUNDS = 4
STORM_SECONDS = 0.05
SOON = 25.0
"""Less than the seconds after which the server itself kills its workers."""
BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CreatedRegistry:
    made = init_registry_folder(tmp_path_factory.mktemp("ending") / "registry")
    served = open_harness(made.settings)
    served.create_namespace("acme", owner="admin")
    served.close()
    return made


def send_signals(tell: Callable[[signal.Signals], object]) -> None:
    """Send both signals in turns, as fast as that goes, from before the end until after it."""
    ended = time.monotonic() + STORM_SECONDS
    while time.monotonic() < ended:
        for number in BOTH:
            tell(number)


def family(server: ServerProcess) -> list[psutil.Process]:
    """The server and its workers."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children()]


def tell_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Tell every process that is still there, as a terminal does."""
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def ends_well(server: ServerProcess, processes: list[psutil.Process]) -> None:
    """The process ends soon, with 0 and without complaint, and takes its workers along."""
    assert server.process.wait(SOON) == 0
    assert [x for x in processes if x.is_running()] == []
    said = server.log.read_text()
    assert "Traceback" not in said
    assert "error" not in said.lower()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_signals_that_come_together_end_it(number: int, made: CreatedRegistry) -> None:
    with run_server(made.settings.data, "--workers", "2") as server:
        processes = family(server)
        assert len(processes) == 3
        send_signals(server.process.send_signal)
        ends_well(server, processes)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_one_of_each_ends_it(number: int, made: CreatedRegistry) -> None:
    with run_server(made.settings.data) as server:
        processes = family(server)
        for each in BOTH:
            server.process.send_signal(each)
        ends_well(server, processes)


def test_a_terminal_that_tells_the_workers_too_ends_it(made: CreatedRegistry) -> None:
    for _ in range(ROUNDS):
        with run_server(made.settings.data, "--workers", "2") as server:
            processes = family(server)
            tell_all(processes, signal.SIGINT)
            ends_well(server, processes)


def test_a_signal_while_its_workers_start_ends_it(made: CreatedRegistry) -> None:
    """A worker that was only forked has the handlers of its parent, so it may lose the first."""
    for _ in range(ROUNDS):
        with start_server(made.settings.data, "--workers", "2") as server:
            while len(processes := family(server)) == 1:
                continue
            server.process.send_signal(signal.SIGTERM)
            ends_well(server, processes)


def test_an_upload_that_runs_is_finished_whatever_is_told(made: CreatedRegistry) -> None:
    blob = random_bytes(300_000)
    digest = compute_digest(blob)
    head = (
        f"POST /v2/acme/x/blobs/uploads/?digest={digest} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {made.token}\r\nContent-Length: {len(blob)}\r\n\r\n"
    )
    with run_server(made.settings.data, "--workers", "2") as server, server.socket() as connection:
        processes = family(server)
        connection.sendall(head.encode() + blob[:200_000])
        send_signals(lambda number: tell_all(processes, number))
        await_refusal(server)
        connection.sendall(blob[200_000:])
        assert connection.recv(1000).startswith(b"HTTP/1.1 201")
        ends_well(server, processes)
    with closing(open_registry(made.settings)) as registry:
        assert registry.storage.path(BlobDigest.parse(digest)).read_bytes() == blob


def test_a_reload_renews_the_workers_and_an_end_meanwhile_is_not_lost(
    made: CreatedRegistry,
) -> None:
    with run_server(made.settings.data) as server:
        (parent, old) = family(server)
        server.process.send_signal(signal.SIGHUP)
        while not (new := [x for x in parent.children() if x != old]):
            continue
        send_signals(server.process.send_signal)
        ends_well(server, [old, *new])


def test_it_ends_with_its_terminal(made: CreatedRegistry) -> None:
    program = "from expertctl.cli.app import main; main()"
    words = ["registry", "serve", str(made.settings.data), "--port", "0"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program, *words])
    shown = b""
    while b"listening on" not in shown:
        shown += os.read(terminal, 4096)
    processes = [psutil.Process(pid), *psutil.Process(pid).children()]
    assert len(processes) == 2
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [each for each in processes if each.is_running()] == []
