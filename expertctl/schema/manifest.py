"""The manifest ``expert.json``: the only truth about what a package is.

`parse_manifest` checks strict JSON, then the JSON Schema (all problems at once), then what a schema
cannot say. Unknown keys are errors unless they begin with ``x-``. The types mirror the document.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.reference import PackageName, Reference, Version
from expertctl.schema.hint import parse_hint
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import problems_of

MAX_MANIFEST_BYTES = 1 << 20
MANIFEST_PATH = "expert.json"
SIGNATURE_PATH = "model.sig"

AdapterKind = Literal["lora", "dora", "ia3", "soft_prompt"]
Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class BaseRequirement:
    """The base model that an expert was made for; digests are ``sha256:<hex>``."""

    name: str
    arch: str
    tokenizer: str
    revision: str | None = None
    weights: str | None = None
    accepts: tuple[str, ...] = ()
    tokenizer_version: Literal[1, 2] = 1
    """What ``tokenizer`` is the digest of: 1 the file, 2 its canonical form."""


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter in the package: its kind, its files and what they must hold."""

    kind: AdapterKind
    path: str
    config: str
    dtype: Dtype
    tensors: int
    rank: int | None = None
    """Of `lora` and `dora`."""
    tokens: int | None = None
    """Of `soft_prompt`: how many virtual tokens."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router may know about an expert."""

    task: str = "default"
    languages: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    exclude_keywords: tuple[str, ...] = ()
    hint: str | None = None
    priority: float = 0.5


@dataclass(frozen=True, slots=True)
class Composition:
    """With which others an expert may, must and must not be used."""

    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    composes_with: tuple[str, ...] = ()
    role: str | None = None
    max_chain: int = 10
    load_order: int = 5


@dataclass(frozen=True, slots=True)
class Decoding:
    """Generation settings that the publisher recommends; ``None`` leaves the preset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measured result, base beside expert."""

    task: str
    dataset_sha256: str
    n: int
    metric: str
    base: float
    expert: float
    date: str


@dataclass(frozen=True, slots=True)
class Limitation:
    """Something the expert is known to do badly."""

    pattern: str
    description: str
    example: str | None = None
    workaround: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """``expert.json`` as typed values; ``training`` stays free-form."""

    schema: Literal[1]
    name: str
    version: str
    description: str
    license: str
    base: BaseRequirement
    adapters: tuple[AdapterEntry, ...]
    authors: tuple[str, ...] = ()
    homepage: str | None = None
    tags: tuple[str, ...] = ()
    routing: Routing = Routing()
    composition: Composition = Composition()
    decoding: Decoding = Decoding()
    evaluation: tuple[Evaluation, ...] = ()
    limitations: tuple[Limitation, ...] = ()

    @property
    def package(self) -> PackageName:
        """The parsed name."""
        return PackageName.parse(self.name)

    @property
    def semver(self) -> Version:
        """The parsed version."""
        return Version.parse(self.version)

    @property
    def ref(self) -> str:
        """``namespace/name@version``, as plans and messages show it."""
        return f"{self.name}@{self.version}"

    @property
    def kind(self) -> str:
        """The kinds of its adapters in order, each once: ``lora``, ``lora+soft_prompt``."""
        return "+".join(dict.fromkeys(entry.kind for entry in self.adapters))

    @property
    def virtual_tokens(self) -> int:
        """How many positions its soft prompts take."""
        return sum(entry.tokens or 0 for entry in self.adapters)


def parse_manifest(data: bytes, *, what: str = MANIFEST_PATH) -> Manifest:
    """Read a manifest.

    Raises:
        InvalidPackageError: with every problem of the document.
    """
    document = load_object(data, what=what, max_bytes=MAX_MANIFEST_BYTES)
    return manifest_of(document, what=what)


def manifest_of(document: JsonObject, *, what: str = MANIFEST_PATH) -> Manifest:
    """Turn a JSON object into a manifest; see `parse_manifest`.

    Raises:
        InvalidPackageError: with every problem of the document.
    """
    problems = _in_words(document, problems_of(document, "manifest"))
    if problems:
        raise InvalidPackageError(what, problems)
    try:
        manifest = shape(document, Manifest)
    except msgspec.ValidationError as error:  # 16.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    problems = _beyond_the_schema(manifest)
    if problems:
        raise InvalidPackageError(what, problems)
    return manifest


def _in_words(document: JsonObject, problems: Iterable[str]) -> list[str]:
    """Say in words what is wrong with a name or a version; the schema would show a pattern."""
    readers = {"name": PackageName.parse, "version": Version.parse}
    said: list[str] = []
    for problem in problems:
        field = problem.partition(":")[0]
        value = document.get(field)
        known = isinstance(value, str) and field in readers
        said += (_unreadable(readers[field], field, [str(value)]) if known else []) or [problem]
    return list(dict.fromkeys(said))


def _beyond_the_schema(manifest: Manifest) -> list[str]:
    """What the schema's patterns cannot decide."""
    problems = _unreadable(PackageName.parse, "name", [manifest.name])
    problems += _unreadable(Version.parse, "version", [manifest.version])
    problems += _unreadable(_need, "composition/requires", manifest.composition.requires)
    problems += _unreadable(_need, "composition/conflicts", manifest.composition.conflicts)
    hint = manifest.routing.hint
    problems += _unreadable(parse_hint, "routing", [hint] if hint is not None else [])
    paths = [p for a in manifest.adapters for p in (a.path, a.config)]
    return problems + [f"two adapters use {p!r}" for p in sorted(set(paths)) if paths.count(p) > 1]


def _need(text: str) -> Reference:
    """Read a reference to another package: by version, as a digest would outlive every fix."""
    reference = Reference.parse(text)
    if reference.digest is not None:
        raise UsageError(f"{text[:80]!r} names a digest, not versions")
    return reference


def _unreadable(read: Callable[[str], object], where: str, texts: Iterable[str]) -> list[str]:
    problems = []
    for text in texts:
        try:
            read(text)
        except ExpertError as error:
            problems.append(f"{where}: {error.message}")
    return problems
