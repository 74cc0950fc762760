"""A process that has imported the command, and copies itself for each run of a page.

A page runs the command a dozen times, and importing takes most of what that costs. `expertctl` in
the folder that `zygote` makes hands its words, folder, environment and files to such a process; the
copy does what the command does, and ends at once: taking imported modules apart takes longer than
most commands. Servers are begun as ever.
"""

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from expertctl.cli.app import main

_CLEAN = {"OMP_NUM_THREADS": "1"}
"""No setting of who runs the tests: what is read of it while modules are imported stays."""
MAX_JOB_BYTES = 1 << 20
"""Bytes of a job, which is mostly the environment."""
PRELOADED_COMMANDS = (
    *("base_profile", "bases", "chat", "config", "connection", "dependencies", "doctor", "install"),
    *("installed", "package_view", "packages", "publish", "registry", "run", "search", "stats"),
    "trust",
)
"""Modules below ``expertctl.cli`` whose commands pages run more than once."""
CLIENT_PROGRAM = """#!{python} -IS
import os, sys
if "serve" in sys.argv[1:]:
    os.execv({command!r}, ["expertctl", *sys.argv[1:]])
import json, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    job = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
    code = server.recv(9)
sys.exit(int(code or 70))
"""


@contextmanager
def run_fork_server(folder: Path) -> Iterator[Path]:
    """Start one; lend the folder of the command that hands over to it."""
    address, command = folder / "zygote", folder / "bin" / "expertctl"
    real = Path(sys.executable).with_name("expertctl")
    text = CLIENT_PROGRAM.format(python=sys.executable, command=str(real), address=str(address))
    command.parent.mkdir()
    command.write_text(text)
    command.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-m", "tests.docs.forkserver", str(listener.fileno())],
            cwd=Path(__file__).parents[2],
            env=_CLEAN | {"PATH": os.environ["PATH"], "HOME": str(folder)},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            try:
                yield command.parent
            finally:
                process.kill()


def serve_jobs(listener: socket.socket) -> None:
    """Do one job after the other, or several at once; return in the copy that does one."""
    while True:
        connection, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            return supervise_job(connection)
        connection.close()


def supervise_job(connection: socket.socket) -> None:
    """Tell how a job ended when nothing of its process is left; return in that process."""
    message, files, _, _ = socket.recv_fds(connection, MAX_JOB_BYTES, 3)
    child = os.fork()
    if child == 0:
        connection.close()
        return enter_job(json.loads(message), files)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.send(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def enter_job(job: dict[str, Any], files: list[int]) -> None:
    """Be where the command was called, with what it was called with."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv[:] = ["expertctl", *job["words"]]


if __name__ == "__main__":
    for name in (*(f"cli.{each}" for each in PRELOADED_COMMANDS), "engine.local_engine"):
        import_module(f"expertctl.{name}")
    gc.collect()
    gc.freeze()
    serve_jobs(socket.socket(fileno=int(sys.argv[1])))
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ended.code or 0))
