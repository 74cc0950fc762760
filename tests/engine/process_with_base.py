"""A process with an engine's ledger that answers until it is told to go on.

`python -m tests.engine.process_with_base FOLDER` says a line when something has happened.
"""

import subprocess
import sys
from pathlib import Path

from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.memory.process_registry import EngineRegistration

BASE_BYTES, KV_BYTES = 60_000_000, 1_000


def read_process_line(process: subprocess.Popen[bytes], command: str = "") -> None:
    """Wait for the next line, after telling it to go on."""
    assert process.stdin is not None
    assert process.stdout is not None
    if command:
        process.stdin.write(f"{command}\n".encode())
        process.stdin.flush()
    assert process.stdout.readline().strip() == b"done"


def main() -> None:
    """Hold a base, answer, then be idle."""
    budget = MemoryBudget(100_000_000)
    presence = EngineRegistration(Path(sys.argv[1]), budget)
    budget.reserve("base", BASE_BYTES, what="the base")
    base = bytearray(b"\x01") * BASE_BYTES
    with presence.mark_answering():
        budget.reserve("kv", KV_BYTES, what="the KV cache")
        presence.publish(base="a base", experts=("acme/sql@1.0.0", "acme/dates@2.0.0"))
        print("done", flush=True)
        sys.stdin.readline()
        budget.release("kv", KV_BYTES)
    print("done", flush=True)
    sys.stdin.readline()
    assert len(base) == BASE_BYTES


if __name__ == "__main__":
    main()
