"""Examples that a tiny base can learn something of, and a base to learn them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from tests.factories import write_base

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_examples(path: Path, count: int = 60) -> Path:
    """Write prompts that name a letter, and the letter twice as the answer; some lengths differ."""
    rows = [
        {"prompt": f"{'very ' * (n % 4)}{LETTERS[n % 26]}{n}", "answer": LETTERS[n % 26] * 2}
        for n in range(count)
    ]
    return write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Write one JSON value a line; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def add_tiny_base(folder: Path, **config: Any) -> tuple[BaseStore, StoredBase]:
    """Register a tiny Llama in a new store."""
    directory = write_base(folder / "tiny", **{"arch": "llama", "layers": 1, **config})
    bases = BaseStore(folder / "bases")
    return bases, bases.add(directory)
