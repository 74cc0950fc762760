"""A process with an engine's ledger that answers until it is told to go on.

`python -m tests.engine.holder FOLDER` says a line when something has happened.
"""

import subprocess
import sys
from pathlib import Path

from expertctl.engine.budget import Budget
from expertctl.engine.presence import Presence

BASE, KV = 60_000_000, 1_000


def told(process: subprocess.Popen[bytes], go_on: str = "") -> None:
    """Wait for the next line, after telling it to go on."""
    assert process.stdin is not None
    assert process.stdout is not None
    if go_on:
        process.stdin.write(f"{go_on}\n".encode())
        process.stdin.flush()
    assert process.stdout.readline().strip() == b"done"


def main() -> None:
    """Hold a base, answer, then be idle."""
    budget = Budget(100_000_000)
    presence = Presence(Path(sys.argv[1]), budget)
    budget.reserve("base", BASE, what="the base")
    base = bytearray(b"\x01") * BASE
    with presence.answering():
        budget.reserve("kv", KV, what="the KV cache")
        presence.holds(base="a base", experts=("acme/sql@1.0.0", "acme/dates@2.0.0"))
        print("done", flush=True)
        sys.stdin.readline()
        budget.release("kv", KV)
    print("done", flush=True)
    sys.stdin.readline()
    assert len(base) == BASE


if __name__ == "__main__":
    main()
