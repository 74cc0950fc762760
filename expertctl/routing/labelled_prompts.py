"""Labelled prompts: which expert should answer each, or that the base should.

A file is JSON Lines in UTF-8, one `LabelledPrompt` a line (``schemas/routing-sample.schema.json``).
It is bounded, read strictly, and all of its problems are reported at once, each with its line.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.reference import PackageName
from expertctl.routing.suggestion import did_you_mean
from expertctl.schema.json_lines import JsonLines, read_lines, repeated
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import MAX_PROBLEMS

_ALIASES = {"text": "prompt", "label": "expert"}
_HINT = 'each line is an object such as {"prompt": "Sort 3, 1, 2", "expert": "acme/sorting"}'


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """One line: what is asked, and which expert should answer; ``None`` is the base alone."""

    line: int
    prompt: str
    expert: PackageName | None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class LabelledPrompts:
    """A file of them; ``digest`` is that of its bytes."""

    path: Path
    digest: Digest
    prompts: tuple[LabelledPrompt, ...]
    warnings: tuple[str, ...] = ()

    @property
    def experts(self) -> list[PackageName]:
        """The experts that are wanted, in order of their names."""
        return sorted({p.expert for p in self.prompts if p.expert is not None})


def read_labelled(path: Path) -> LabelledPrompts:
    """Read a file of labelled prompts.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file.
    """
    data = read_lines(path)
    lines = JsonLines(str(path), schema="routing-sample", hint=_HINT, aliases=_ALIASES)
    prompts = [_prompt(number, document) for number, document in lines.read(data)]
    lines.check_ids((prompt.line, prompt.id) for prompt in prompts)
    lines.check()
    again = repeated(path, ((prompt.line, prompt.prompt) for prompt in prompts))
    return LabelledPrompts(path, Digest.of(data), tuple(prompts), again)


def check_installed(data: LabelledPrompts, installed: Collection[PackageName]) -> None:
    """Demand that every wanted expert is installed.

    Raises:
        NotFoundError: with every name that is not installed, the line where it comes first, and
            what may have been meant.
    """
    first: dict[PackageName, int] = {}
    for prompt in data.prompts:
        if prompt.expert is not None and prompt.expert not in installed:
            first.setdefault(prompt.expert, prompt.line)
    if first:
        told = [_unknown(*pair, installed) for pair in list(first.items())[:MAX_PROBLEMS]]
        told += ["… and more"] * (len(first) > MAX_PROBLEMS)
        count = "1 expert is" if len(first) == 1 else f"{len(first)} experts are"
        raise NotFoundError(
            f"{data.path}: {count} not installed\n" + "\n".join(f"  - {line}" for line in told),
            hint="`expertctl list` shows what is installed; null is for the base alone",
        )


def _unknown(name: PackageName, line: int, installed: Collection[PackageName]) -> str:
    meant = did_you_mean(name, installed)
    return f"line {line}: {name}{f'; {meant}' if meant else ''}"


def _prompt(number: int, document: JsonObject) -> LabelledPrompt:
    expert, name = document["expert"], document.get("id")
    return LabelledPrompt(
        line=number,
        prompt=str(document["prompt"]),
        expert=None if expert is None else PackageName.parse(str(expert)),
        id=None if name is None else str(name),
    )
