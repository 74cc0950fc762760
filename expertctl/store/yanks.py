"""Which installed versions were yanked, according to what their registries said last.

``yanked.json`` repeats that from the index documents that were believed, for code that only reads
and may be offline: the router, `list` and `why`. Every command that reads an index writes it again,
so a file that is missing or damaged names no version until then. It holds installed versions only.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from expertctl.durable import write_atomic
from expertctl.reference import PackageName, Version
from expertctl.store.ref import StoredExpert

FILE = "yanked.json"
MODE = 0o600
MAX_BYTES = 16 << 20

Yanks = Mapping[tuple[str, str], str]
"""Registry and ``namespace/name@version`` → why it was yanked, which may be empty."""
Stated = Mapping[tuple[str, PackageName], Mapping[Version, str]]
"""What registries say now: host and package → its yanked versions, with the reasons."""


def read_yanks(path: Path) -> dict[tuple[str, str], str]:
    """Read the yanked versions; a file that is missing or damaged has none."""
    try:
        with path.open("rb") as stream:
            document = json.loads(stream.read(MAX_BYTES))
        return {
            (host, ref): reason
            for host, refs in document.items()
            for ref, reason in refs.items()
            if isinstance(reason, str)
        }
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}


def record_yanks(
    path: Path,
    stated: Stated,
    *,
    installed: Callable[[], Iterable[StoredExpert]],
    locked: Callable[[], AbstractContextManager[object]],
) -> None:
    """Write down what registries say about installed versions; packages not in ``stated`` stay.

    ``locked`` keeps other processes from writing; it is used only where something changes.

    Raises:
        StoreError: when the lock cannot be taken.
        OSError: when the file cannot be written.
    """
    experts = list(installed())
    if _updated(read_yanks(path), stated, experts) == read_yanks(path):
        return
    with locked():
        after = _updated(read_yanks(path), stated, list(installed()))
        write_atomic(path, _encoded(after), mode=MODE)


def _updated(before: Yanks, stated: Stated, installed: Iterable[StoredExpert]) -> Yanks:
    after = {}
    for expert in installed:
        key = expert.registry, expert.ref
        said = stated.get((expert.registry, expert.package))
        reason = before.get(key) if said is None else said.get(expert.version)
        if reason is not None:
            after[key] = reason
    return after


def _encoded(yanks: Yanks) -> bytes:
    document: dict[str, dict[str, str]] = {}
    for (host, ref), reason in sorted(yanks.items()):
        document.setdefault(host, {})[ref] = reason
    return json.dumps(document, indent=1).encode()
