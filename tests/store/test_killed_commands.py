"""The real command, killed by the kernel at every system call that changes the disk.

Where `test_crashes` counts Python's steps, strace counts those of the whole process, SQLite's
included.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.install.doctor import Diagnosis, examine_store
from tests.store.fixtures import HomeFixture, PackageFactory

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

CALLS = (
    "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "rename", "unlink", "mkdir", "rmdir",
    "flock",
)  # fmt: skip
PROGRAM = "from expertctl.cli.app import main; main()"
SIGKILL = -9


def command(user_home: HomeFixture, *words: object, call: str = "", at: int = 0) -> int:
    """Run one command; kill it when it makes the ``at``-th call of that name."""
    tracer = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}"]
    tracer += ["-e", f"inject={call}:signal=SIGKILL:when={at}"]
    program = [sys.executable, "-B", "-c", PROGRAM, *map(str, words)]
    environment = {
        **os.environ,
        "EXPERT_HOME": str(user_home.root),
        "EXPERT_ENCODER": "lexical",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [*(tracer if call else []), *program],
        env=environment,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert b"Traceback" not in result.stderr, result.stderr.decode()
    return result.returncode


def diagnose(user_home: HomeFixture) -> Diagnosis:
    return examine_store(
        user_home.store, bases=user_home.bases, trust=user_home.trust, catalogue=user_home.catalogue
    )


def strace_works() -> bool:
    probe = ["strace", "-qq", "-o", os.devnull, "-f", "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("call", CALLS)
def test_killed_at_every_system_call_the_next_command_works(
    call: str, package_factory: PackageFactory, fast: Path
) -> None:
    if not strace_works():
        pytest.skip("tracing is not allowed here")
    template = HomeFixture(fast / "template").trust_keys("acme")
    template.install(
        package_factory.package("acme/old"), catalogue=template.catalogue, index=template.index
    )
    file = package_factory.package("acme/new", seed=1)
    for at in range(1, 1000):
        shutil.rmtree(fast / "home", ignore_errors=True)
        shutil.copytree(template.root, fast / "home")
        user_home = HomeFixture(fast / "home")
        code = command(user_home, "install", file, call=call, at=at)
        assert user_home.refs() in (["acme/old@1.0.0"], ["acme/new@1.0.0", "acme/old@1.0.0"])
        user_home.check_integrity()
        (done,) = user_home.install(file, catalogue=user_home.catalogue, index=user_home.index)
        assert not any("not indexed" in warning for warning in done.warnings)
        assert (
            user_home.refs()
            == user_home.catalogue.list_refs()
            == ["acme/new@1.0.0", "acme/old@1.0.0"]
        )
        user_home.check_integrity()
        assert diagnose(user_home).healthy
        if code != SIGKILL:
            assert code == 0
            assert at > 1 or call in {"ftruncate", "rmdir", "fdatasync"}
            break
