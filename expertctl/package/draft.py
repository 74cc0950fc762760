"""Drafting ``expert.json`` from an existing one, the command line, and what the files show.

What cannot be known is a problem, and all problems come at once.

Order of authority: flags, then an existing ``expert.json``, then the files. What the files decide
(rank, dtype, number of tensors) cannot be overridden: a manifest that differs is refused.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import KIND_NAMES
from expertctl.package.adapter_config import AdapterConfig
from expertctl.package.adapter_files import CONFIG_PATH, WEIGHTS_PATH, AdapterFiles, read_label
from expertctl.package.base_model import BaseFacts, BaseIdentity
from expertctl.package.config_cleaning import full_precision_label
from expertctl.package.layout import name_problem
from expertctl.package.source_files import cached_name, source_file
from expertctl.package.tokenizer_form import FORM_VERSION
from expertctl.plain_text import one_line
from expertctl.reference import PackageName
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

DEFAULT_NAMESPACE = "local"
DEFAULT_VERSION = "0.1.0"
DEFAULT_LICENSE = "unspecified"
_LONGEST_LABEL = 200
"""How much of what an adapter calls its base is shown."""
BASE_HINT = "run `expertctl base add DIR`, or pass `--base DIR`"
_LETTERS = str.maketrans(
    {
        "ß": "ss",
        "æ": "ae",
        "œ": "oe",
        "ø": "o",
        "ł": "l",
        "đ": "d",
        "ð": "d",
        "þ": "th",
        "\u0131": "i",
    }
)
"""Latin letters that Unicode does not decompose."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says; ``None`` means nothing."""

    name: str | None = None
    version: str | None = None
    description: str | None = None
    license: str | None = None


def base_label(directory: Path) -> str | None:
    """Return what the directory calls its base: a label to look up, never a path to open.

    Raises:
        InvalidPackageError: when a file that should say so cannot be read at all.
    """
    draft = read_draft(directory)
    base = draft.get("base")
    name = base.get("name") if isinstance(base, dict) else None
    for _, config_path in named_adapters(draft.get("adapters"))[:1] if name is None else ():
        name = read_label(directory, config_path)
    return name if isinstance(name, str) else None


def named_adapters(stated: JsonValue) -> list[tuple[str, str]]:
    """Return the files of each adapter in a draft: as stated, else the names that PEFT gives.

    The schema reports other entries; no path that a manifest gives is ever followed.
    """
    if not isinstance(stated, list):
        return [(WEIGHTS_PATH, CONFIG_PATH)]
    names = []
    for entry in stated:
        weights = entry.get("path") if isinstance(entry, dict) else None
        config = entry.get("config") if isinstance(entry, dict) else None
        if isinstance(weights, str) and isinstance(config, str):
            names += [] if name_problem(weights) or name_problem(config) else [(weights, config)]
    return names


def read_draft(directory: Path) -> JsonObject:
    """Return ``expert.json`` as it is, or an empty one.

    Raises:
        InvalidPackageError: when it is not a JSON object.
    """
    found = source_file(directory, MANIFEST_PATH) if directory.is_dir() else None
    if found is None:
        return {}
    data = found.read(max_bytes=MAX_MANIFEST_BYTES)
    return load_object(data, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)


def complete(
    existing: JsonObject,
    overrides: Overrides,
    *,
    directory: Path,
    adapters: Sequence[AdapterFiles],
    base: BaseFacts | None,
) -> JsonObject:
    """Return the manifest with everything filled in that can be known."""
    said = {
        "name": overrides.name,
        "version": overrides.version,
        "description": overrides.description,
        "license": overrides.license,
    }
    name = overrides.name or existing.get("name") or default_name(directory)
    document: JsonObject = {
        "schema": 1,
        "name": name,
        "version": DEFAULT_VERSION,
        "description": f"{_description(adapters)} {str(name).partition('/')[2]}",
        "license": DEFAULT_LICENSE,
        **existing,
        **{key: value for key, value in said.items() if value is not None},
    }
    label = adapters[0].config if adapters else None
    document["base"] = _base(existing.get("base"), label, base)
    if adapters or "adapters" in existing:
        document["adapters"] = _entries(existing.get("adapters"), adapters)
    return document


def encode(document: JsonObject) -> bytes:
    """Return the text of a manifest as we write it.

    Raises:
        InvalidPackageError: when it is longer than a manifest may be.
    """
    text = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    if len(text) > MAX_MANIFEST_BYTES:
        problem = f"{len(text)} bytes when it is complete, at most {MAX_MANIFEST_BYTES} allowed"
        raise InvalidPackageError(MANIFEST_PATH, [problem])
    return text


def default_name(directory: Path) -> str:
    """Return ``local/`` and a package name made of the directory's, or of its repository's.

    Letters are written in ASCII where they have a counterpart there.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", _in_ascii(_title(directory).lower()))
    slug = slug.strip("-")[:64].strip("-")
    return str(PackageName(DEFAULT_NAMESPACE, slug or "expert"))


def describe_lost_letters(
    directory: Path, existing: JsonObject, overrides: Overrides
) -> str | None:
    """Return a note where a default name leaves out letters that have no counterpart in ASCII."""
    name = _title(directory)
    lost = [letter for letter in _in_ascii(name.lower()) if letter.isalnum() and letter > "\x7f"]
    if overrides.name or existing.get("name") or not lost:
        return None
    return f"{default_name(directory)} is what is left of {name!r} in ASCII; `--name` gives another"


def _title(directory: Path) -> str:
    """Return the name of a directory; in the hub's cache, that of its repository."""
    return cached_name(directory) or directory.resolve().name


def _in_ascii(text: str) -> str:
    """Write letters of the Latin script without marks: ``ünï`` is ``uni``, ``straße`` ``strasse``.

    Letters of other scripts stay as they are.
    """
    decomposed = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def base_problems(document: JsonObject) -> list[str]:
    """Return what is not known about the base, with the way out."""
    base = document.get("base")
    absent = [k for k in ("arch", "tokenizer") if not (isinstance(base, Mapping) and base.get(k))]
    if not absent:
        return []
    stated = base.get("name") if isinstance(base, Mapping) else None
    name = one_line(stated[:_LONGEST_LABEL]) if isinstance(stated, str) else None
    full = full_precision_label(name) if name is not None else None
    if full is not None:
        return [
            f"base {name} is a quantised copy of {full}, which is not known here, so its digests "
            f"cannot be stated: {BASE_HINT}"
        ]
    label = f"base {name}" if name else "the base"
    return [f"{label} is not known here, so its digests cannot be stated: {BASE_HINT}"]


def _description(adapters: Sequence[AdapterFiles]) -> str:
    kinds = dict.fromkeys(KIND_NAMES[adapter.spec.kind] for adapter in adapters)
    return f"{' and '.join(kinds)} adapter".lstrip()


def _entries(stated: JsonValue, adapters: Sequence[AdapterFiles]) -> JsonValue:
    """Fill in what the files decide; what the publisher wrote already is checked, not replaced."""
    if stated is None:
        return [_entry(adapter) for adapter in adapters]
    if not isinstance(stated, list):
        return stated
    found = {(adapter.weights_path, adapter.config_path): _entry(adapter) for adapter in adapters}
    return [_completed(entry, found) for entry in stated]


def _completed(entry: JsonValue, found: Mapping[tuple[str, str], JsonObject]) -> JsonValue:
    names = named_adapters([entry])
    return {**found.get(names[0], {}), **entry} if names and isinstance(entry, dict) else entry


def _entry(adapter: AdapterFiles) -> JsonObject:
    spec = adapter.spec
    sizes: JsonObject = {"rank": spec.rank, "tokens": spec.tokens}
    return {
        "kind": spec.kind,
        "path": adapter.weights_path,
        "config": adapter.config_path,
        **{name: size for name, size in sizes.items() if size is not None},
        "dtype": spec.dtype,
        "tensors": spec.tensors,
    }


def _base(existing: object, config: AdapterConfig | None, base: BaseFacts | None) -> JsonObject:
    """What the publisher wrote about the base stays; what is missing comes from the base itself."""
    stated = existing if isinstance(existing, dict) else {}
    if all(stated.get(key) for key in ("name", "arch", "tokenizer")):
        return stated
    known: JsonObject = {}
    version = stated.get("tokenizer_version")
    if config is not None and config.base_label:
        known = {"name": config.base_label, "revision": config.base_revision}
    if base is not None:
        identity = base.identity
        known = {
            "name": identity.name,
            "revision": identity.revision,
            "arch": str(identity.arch),
            "weights": str(identity.weights) if identity.weights else None,
            **_tokenizer(identity, version if isinstance(version, int) else FORM_VERSION),
        }
    if stated.get("tokenizer"):
        known.pop("tokenizer_version", None)
    return {**known, **stated}


def _tokenizer(identity: BaseIdentity, version: int) -> JsonObject:
    """Return the digest of the tokenizer; version 1 is not written, it is the default."""
    if version == 1 or identity.canonical_tokenizer is None:
        return {"tokenizer": str(identity.tokenizer)}
    return {
        "tokenizer": str(identity.canonical_tokenizer),
        "tokenizer_version": FORM_VERSION,
    }
