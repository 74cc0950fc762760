"""The folder of a training, and the manifest of its adapter.

::

    NAME.training/
        checkpoint.safetensors   where to continue
        adapter/                 the trained adapter as PEFT writes it, and expert.json
        test.jsonl               the test prompts, for `expertctl eval`

The manifest states what was measured and what was not: the data by their digest, the settings, the
held-out loss before and after, the results on test prompts, and what was answered wrongly.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from expertctl import __version__
from expertctl.engine.evaluation_result import EvaluationResult
from expertctl.files import write_atomic
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import draft_manifest
from expertctl.package.draft import (
    MAX_EXAMPLE_CHARACTERS,
    ManifestOverrides,
    encode_manifest,
)
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.disk import disk_errors
from expertctl.train.data import TrainingData, TrainingExample

_LIBRARIES = ("torch", "transformers", "peft")
_ROUTING_EXAMPLES = 50
_ANSWER_MARGIN, _ANSWER_EXTRA = 1.25, 8
"""The longest answer of the examples, times this, plus some tokens, is the limit of an answer."""
_MAX_SHOWN = 600


@dataclass(frozen=True, slots=True)
class TrainingFolder:
    """The files of one training."""

    path: Path

    @classmethod
    def for_package(cls, package: Path) -> "TrainingFolder":
        """Return the folder that belongs to a package."""
        return cls(package.with_name(f"{package.stem}.training"))

    @property
    def adapter(self) -> Path:
        """The folder with the adapter."""
        return self.path / "adapter"

    @property
    def checkpoint(self) -> Path:
        """Where to continue."""
        return self.path / "checkpoint.safetensors"

    @property
    def test(self) -> Path:
        """The test prompts and their answers."""
        return self.path / "test.jsonl"

    @property
    def lock(self) -> Path:
        """Held while a process trains there."""
        return self.path / ".lock"


def write_test_data(folder: TrainingFolder, examples: Sequence[TrainingExample]) -> int:
    """Write the test examples that are a prompt and an answer; return their number."""
    rows = [
        {"prompt": example.prompt, "answer": example.answer}
        for example in examples
        if example.prompt is not None
    ]
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    with disk_errors(folder.test):
        write_atomic(folder.test, text.encode())
    return len(rows)


def write_training_manifest(
    folder: TrainingFolder,
    overrides: ManifestOverrides,
    data: TrainingData,
    *,
    base: BaseFacts,
    longest_answer: int,
    training: JsonObject,
    result: EvaluationResult | None = None,
) -> JsonObject:
    """Write ``expert.json`` beside the adapter; with ``result``, what was answered wrongly too.

    Raises as `draft_manifest` and `encode_manifest`.
    """
    path = folder.adapter / MANIFEST_PATH
    path.unlink(missing_ok=True)  # what an earlier training wrote there is not kept
    described = f"Trained on {len(data.train)} examples of {data.path.name}"
    chosen = replace(overrides, description=overrides.description or described)
    examples = choose_routing_examples(data.train)
    document = draft_manifest(folder.adapter, chosen, base=base, examples=examples)
    limit = int(longest_answer * _ANSWER_MARGIN) + _ANSWER_EXTRA
    document["decoding"] = {"temperature": 0.0, "max_tokens": min(limit, 200_000)}
    document["limitations"] = [*describe_limitations(data, result)]
    document["training"] = training
    with disk_errors(path):
        write_atomic(path, encode_manifest(document))
    return document


def choose_routing_examples(examples: Sequence[TrainingExample]) -> list[str]:
    """Return prompts for the router, in the order of their hashes: those of all lines alike."""
    prompts = [
        next(m.content for m in reversed(example.messages) if m.role == "user").strip()
        for example in sorted(examples, key=lambda example: (example.position, example.line))
    ]
    short = [prompt for prompt in prompts if 0 < len(prompt) <= MAX_EXAMPLE_CHARACTERS]
    return list(dict.fromkeys(short))[:_ROUTING_EXAMPLES]


def describe_limitations(
    data: TrainingData, result: EvaluationResult | None
) -> list[dict[str, JsonValue]]:
    """Return the entries of ``limitations``: what was not measured, and what failed."""
    lengths = [sum(len(m.content) for m in e.messages[:-1]) for e in data.train]
    entries: list[dict[str, JsonValue]] = [
        {
            "pattern": "prompts unlike the training examples",
            "description": f"Trained on {len(data.train)} examples with prompts of "
            f"{min(lengths)} to {max(lengths)} characters; other prompts were not measured.",
        }
    ]
    if result is None:
        entries.append(
            {
                "pattern": "all prompts",
                "description": "The answers were not measured, only the held-out loss.",
            }
        )
        return entries
    wrong, n = result.expert.wrong_answers, len(result.data.samples)
    if wrong:
        first = wrong[0]
        entries.append(
            {
                "pattern": "prompts like the test examples",
                "description": f"{len(wrong)} of {n} test prompts were answered wrongly. One "
                f"answer was {_shorten(first.text)}; right is {_shorten(first.sample.answer)}.",
                "example": first.sample.prompt[:_MAX_SHOWN],
            }
        )
    if result.expert.right_count <= result.base.right_count:
        entries.append(
            {
                "pattern": "all prompts",
                "description": f"No gain was measured: the base alone answered "
                f"{result.base.right_count} of {n} test prompts correctly, with the expert it "
                f"was {result.expert.right_count}.",
            }
        )
    return entries


def _shorten(text: str) -> str:
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return json.dumps(shown, ensure_ascii=False)


def find_library_versions() -> Mapping[str, JsonValue]:
    """Return the versions of what trains; another one may give other numbers."""
    found: dict[str, JsonValue] = {"expertctl": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # in a folder without metadata
            found[name] = None
    return found
