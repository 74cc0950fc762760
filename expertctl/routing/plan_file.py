"""Reading a saved plan: the document of ``route --json`` or of ``run --json``, from anywhere.

A plan file is untrusted: it is checked against ``schemas/route.schema.json``, and what it names is
looked up by digest again before anything is loaded. Of the rest only ``threads`` is read, because
the last bits of the numbers depend on it.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.regular_file import open_regular
from expertctl.routing.plan import Plan, PlannedExpert, SamplingParams
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import problems_of

MAX_PLAN_BYTES = 16 << 20
_MAX_THREADS = 1 << 16
_SAVE_ONE = "save one with `expertctl route --json PROMPT > plan.json`"


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan from a document, and how many threads its run had, where a run wrote it."""

    plan: Plan
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class _Expert:
    """An entry of ``experts`` as it is spelled in JSON."""

    ref: str
    content_digest: str
    package_digest: str
    kind: str
    score: float
    weight: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Document:
    """The ``plan`` object as it is spelled in JSON."""

    identity: str
    seed: int
    base: str
    experts: tuple[_Expert, ...]
    params: SamplingParams


def read_plan(path: Path) -> SavedPlan:
    """Read the plan in a file.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the document, or when it is no regular file.
    """
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_PLAN_BYTES + 1)
    except NotFoundError as error:
        error.hint = _SAVE_ONE
        raise
    except OSError as error:
        message = f"plan {path}: {error.strerror or error}"
        raise NotFoundError(message, hint=_SAVE_ONE) from error
    return parse_plan(data, what=str(path))


def parse_plan(data: bytes, *, what: str = "plan") -> SavedPlan:
    """Read the plan in the bytes of a ``route --json`` or ``run --json`` document.

    Raises:
        InvalidPackageError: with every problem of the document.
    """
    document = load_object(data, what=what, max_bytes=MAX_PLAN_BYTES)
    if "plan" not in document:
        raise InvalidPackageError(what, ["there is no 'plan' in it"], hint=_SAVE_ONE)
    read: JsonObject = {"plan": document["plan"]}
    problems = problems_of(read, "route")
    threads = document.get("threads")
    if threads is not None and not _is_count(threads):
        problems = [*problems, "threads: not a number of threads"]
    if problems:
        raise InvalidPackageError(what, problems)
    try:
        plan = _plan(shape(read["plan"], _Document))
    except msgspec.ValidationError as error:  # 7.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    doubled = _doubled(plan)
    if doubled:
        raise InvalidPackageError(what, [f"{ref} is planned twice" for ref in doubled])
    return SavedPlan(plan, threads if isinstance(threads, int) else None)


def _is_count(value: JsonValue) -> bool:
    """Tell whether a value is a number of threads; ``true`` is not."""
    return type(value) is int and 1 <= value <= _MAX_THREADS


def _plan(document: _Document) -> Plan:
    return Plan(
        identity=Digest.parse(document.identity),
        seed=document.seed,
        base=document.base,
        experts=tuple(map(_planned, document.experts)),
        params=document.params,
    )


def _planned(expert: _Expert) -> PlannedExpert:
    return PlannedExpert(
        ref=expert.ref,
        content_digest=Digest.parse(expert.content_digest),
        package_digest=Digest.parse(expert.package_digest),
        kind=expert.kind,
        score=expert.score,
        weight=expert.weight,
        reason=expert.reason,
    )


def _doubled(plan: Plan) -> list[str]:
    digests = [expert.content_digest for expert in plan.experts]
    return sorted({e.ref for e in plan.experts if digests.count(e.content_digest) > 1})
