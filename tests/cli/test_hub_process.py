"""Downloads from a hub that are killed, interrupted, too large for the disk, or asked for."""

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories import write_base
from tests.install.hub_server import HubRepository, HubServer, open_hub

pytestmark = pytest.mark.all

NAME, WEIGHTS = "acme/tiny", "model.safetensors"
CUT = 50_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with open_hub() as server:
        folder = write_base(tmp_path / "base", layers=1, hidden=64, heads=2, kv_heads=1)
        server.repositories[NAME] = HubRepository.from_folder(folder)
        yield server


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """The variables of a user with an empty cache and a token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {
        **kept,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_secretsecret",
    }


def start(environment: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "expertctl", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_download_that_was_ended_goes_on_where_it_stopped(
    end: signal.Signals, hub: HubServer, environment: dict[str, str], tmp_path: Path
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.stall = WEIGHTS, CUT, True
    hub.faults.cuts = 1
    process = start(environment, "pull", NAME)
    assert hub.stalled.wait(60)
    blobs = tmp_path / "hf" / "hub" / "models--acme--tiny" / "blobs"
    partial = blobs / f"{hub.repositories[NAME].etag(WEIGHTS)}.incomplete"
    while not partial.exists() or not partial.stat().st_size:
        assert process.poll() is None
    process.send_signal(end)
    code, _, err = finish(process)
    assert code == (-signal.SIGKILL if end == signal.SIGKILL else 130)
    assert "Traceback" not in err
    kept = partial.stat().st_size
    assert 0 < kept <= CUT

    hub.requests.clear()
    code, out, err = finish(start(environment, "pull", NAME, "--json"))
    assert code == 0, err
    (request,) = [r for r in hub.requests if r.stage == "cdn" and r.name == WEIGHTS]
    assert request.headers["range"] == f"bytes={kept}-"
    size = len(hub.repositories[NAME].files[WEIGHTS])
    assert request.sent == hub.count_sent() == size - kept
    assert f'"downloaded": {size - kept}' in out
    weights = tmp_path / "hf/hub/models--acme--tiny/snapshots" / hub.repositories[NAME].commit
    assert (weights / WEIGHTS).read_bytes() == hub.repositories[NAME].files[WEIGHTS]
    assert not list(blobs.glob("*.incomplete"))


def test_a_connection_without_bytes_counts_as_broken(
    hub: HubServer, environment: dict[str, str]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.stall = WEIGHTS, CUT, True
    hub.faults.cuts = 1
    code, _, err = finish(
        start({**environment, "HF_HUB_DOWNLOAD_TIMEOUT": "1"}, "pull", NAME, "--json")
    )
    assert code == 0, err
    assert hub.count_sent(WEIGHTS) == len(hub.repositories[NAME].files[WEIGHTS])


def test_a_disk_that_is_full_ends_a_download_which_goes_on_later(
    hub: HubServer, environment: dict[str, str], tmp_path: Path
) -> None:
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({CUT}, {resource.RLIM_INFINITY}))\n"
        "from expertctl.cli.app import main\n"
        f"sys.argv = ['expertctl', 'pull', {NAME!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
    assert "File too large" in done.stderr
    hub.requests.clear()
    code, _, err = finish(start(environment, "pull", NAME))
    assert code == 0, err
    assert hub.count_sent(WEIGHTS) == len(hub.repositories[NAME].files[WEIGHTS]) - CUT


def answer_at_terminal(
    environment: dict[str, str], typed: bytes, *words: str
) -> tuple[int, bytes, bytes]:
    """Run a command whose stdin and stderr are a terminal; return its code, stdout and stderr."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "expertctl", *words],
        env=environment,
        stdin=child,
        stderr=child,
        stdout=subprocess.PIPE,
    )
    os.close(child)
    os.write(parent, typed)
    shown = b""
    while True:
        try:
            chunk = os.read(parent, 4096)
        except OSError:  # EIO: nobody holds the other side any more
            break
        if not chunk:
            break
        shown += chunk
    out, _ = process.communicate(timeout=120)
    os.close(parent)
    return process.returncode, out, shown


def test_run_offers_the_download_at_a_terminal(hub: HubServer, environment: dict[str, str]) -> None:
    code, out, shown = answer_at_terminal(environment, b"", "route", "x", "--base", "acme/none")
    assert (code, out) == (3, b"")
    assert b"no base is called 'acme/none', and 127.0.0.1" in shown
    hub.repositories["acme/gguf"] = HubRepository({"a.gguf": b"x"})
    code, _, shown = answer_at_terminal(environment, b"", "route", "x", "--base", "acme/gguf")
    assert (code, b"Download acme" in shown) == (2, False)
    assert b"`expertctl pull acme/gguf`" in shown
    assert b"--file" in shown
    words = ("route", "hello", "--base", NAME)
    code, out, shown = answer_at_terminal(environment, b"n\n", *words)
    assert (code, out) == (3, b"")
    assert b"Download acme/tiny (124.0 kB) from 127.0.0.1" in shown
    assert b"expertctl pull acme/tiny" in shown
    assert hub.count_sent() == 0
    code, out, shown = answer_at_terminal(environment, b"y\n", *words)
    assert code == 0, shown
    assert b"registered the base acme/tiny" in shown
    assert b"acme/tiny" in out
    code, _, shown = answer_at_terminal(environment, b"", *words)
    assert (code, b"Download" in shown) == (0, False)
