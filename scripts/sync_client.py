"""Write expertctl/client/client.py, the synchronous client, from async_client.py.

``python -m scripts.sync_client``, in the root of the checkout. The two clients differ only in
``async``, ``await`` and the names of `REPLACEMENTS`; ruff removes imports that are no longer used
and formats the result.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "expertctl" / "client"
SOURCE = CLIENT / "async_client.py"
TARGET = CLIENT / "client.py"
DOCSTRING = '''\
"""`ExpertClient`: the API of a generation server, for threads.

A `Transport` sends the requests of a client and retries them where that may help;
`InferStream` reads an answer piece by piece; `JobsClient` submits and polls jobs.

Generated from `expertctl.client.async_client`: change that module, then run
``python -m scripts.sync_client``.
"""
'''
REPLACEMENTS = (
    (r"for one event loop", "for any number of threads"),
    (r"\ban ``async with``", "a ``with``"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[([\w.]+)\]", r"\1"),
    (r"\bAsyncGenerator\[Chunk, None\]", "Generator[Chunk, None, None]"),
    (r"\bAsync([A-Z])", r"\1"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(iter|next|enter|exit)__\b", r"__\1__"),
    (r"\ba(close|iter_bytes|next)\b", r"\1"),
)
"""Patterns and what replaces them, in this order."""
RUFF = [sys.executable, "-m", "ruff"]


def convert(source: str) -> str:
    """Return the source of the synchronous client."""
    code = source.split('"""\n', maxsplit=1)[1]
    for pattern, replacement in REPLACEMENTS:
        code = re.sub(pattern, replacement, code)
    fix = ("check", "--quiet", "--fix-only", "--select=F401,I")
    return _run_ruff(("format", "--quiet"), _run_ruff(fix, DOCSTRING + code))


def _run_ruff(arguments: tuple[str, ...], code: str) -> str:
    command = [*RUFF, *arguments, f"--stdin-filename={TARGET}", "-"]
    done = subprocess.run(  # noqa: S603  # our own arguments
        command, input=code, capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    TARGET.write_text(convert(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
