"""Drafting ``expert.json`` from an existing one, the command line, and the files.

The order of precedence is: options, then an existing ``expert.json``, then the files. What the
files determine (rank, dtype, number of tensors) cannot be overridden: a manifest that differs is
refused. What cannot be determined is a problem, and all problems are reported at once.

Example prompts for ``routing.examples`` come from a file with one prompt a line, in UTF-8, or from
JSON Lines, objects with a ``prompt``, like files of evaluation samples. Blank lines are skipped.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from expertctl.errors import InvalidPackageError, to_single_line
from expertctl.package.adapter import (
    KIND_NAMES,
    AdapterConfig,
    find_full_precision_label,
    is_hub_name,
)
from expertctl.package.adapter_files import AdapterFiles, read_base_label
from expertctl.package.base_model import BaseFacts, BaseIdentity
from expertctl.package.directory import (
    CONFIG_PATH,
    WEIGHTS_PATH,
    find_cached_name,
    find_source_file,
)
from expertctl.package.layout import describe_name_problem
from expertctl.package.tokenizer import FORM_VERSION
from expertctl.reference import PackageName
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import read_json_lines

MAX_EXAMPLES = 200
MAX_EXAMPLE_CHARACTERS = 2000
MAX_EXAMPLES_BYTES = 4 << 20
_HINT = 'write one prompt a line, or JSON objects such as {"prompt": "Sort 3, 1, 2"}'


def read_example_prompts(path: Path) -> list[str]:
    """Return the prompts in a file without duplicates.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file, each with its line.
    """
    data = read_json_lines(path)
    if len(data) > MAX_EXAMPLES_BYTES:
        raise InvalidPackageError(
            str(path), [f"more than {MAX_EXAMPLES_BYTES >> 20} MiB"], hint=_HINT
        )
    examples: list[str] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            examples += _parse_example_line(line)
        except InvalidPackageError as error:
            problems += [f"line {number}: {problem}" for problem in error.problems]
    examples = list(dict.fromkeys(examples))
    if not examples and not problems:
        problems.append("there is no prompt in it")
    if len(examples) > MAX_EXAMPLES:
        problems.append(f"{len(examples)} prompts, at most {MAX_EXAMPLES} are allowed")
    if problems:
        raise InvalidPackageError(str(path), problems, hint=_HINT)
    return examples


def _parse_example_line(line: bytes) -> list[str]:
    """Return the prompt in a line; an empty list for a blank line."""
    text = _decode_line(line).strip()
    if text.startswith("{"):
        found = load_object(line, what="prompt", max_bytes=MAX_EXAMPLES_BYTES).get("prompt")
        if not isinstance(found, str) or not found.strip():
            raise InvalidPackageError("prompt", ["an object without a text called prompt"])
        text = found.strip()
    if len(text) > MAX_EXAMPLE_CHARACTERS:
        problem = f"{len(text)} characters, at most {MAX_EXAMPLE_CHARACTERS} are allowed"
        raise InvalidPackageError("prompt", [problem])
    return [text] if text else []


def _decode_line(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidPackageError("prompt", ["not UTF-8"]) from error


DEFAULT_NAMESPACE = "local"
DEFAULT_VERSION = "0.1.0"
DEFAULT_LICENSE = "unspecified"
_MAX_LABEL = 200
"""How many characters of an adapter's base label are shown."""
BASE_HINT = "run `expertctl base add DIR`, or name one with `--base NAME` or `--base DIR`"
_ASCII_LETTERS = str.maketrans(
    dict(zip("ßæœøłđðþ\u0131", ("ss", "ae", "oe", "o", "l", "d", "d", "th", "i"), strict=True))
)
"""Latin letters that Unicode does not decompose."""


@dataclass(frozen=True, slots=True)
class ManifestOverrides:
    """Values from the command line; ``None`` means not given."""

    name: str | None = None
    version: str | None = None
    description: str | None = None
    license: str | None = None
    source: JsonObject | None = None
    """Where the adapter was taken from, for ``training.source``."""


def find_base_label(directory: Path, converted: Path | None = None) -> str | None:
    """Return the directory's label of its base: a name to look up, never a path to open.

    Raises:
        InvalidPackageError: when a file that should contain it is not readable.
    """
    draft = read_draft(directory)
    base = draft.get("base")
    name = base.get("name") if isinstance(base, dict) else None
    for _, config_path in list_named_adapters(draft.get("adapters"))[:1] if name is None else ():
        name = read_base_label(directory, config_path, converted)
    return name if isinstance(name, str) else None


def list_named_adapters(stated: JsonValue) -> list[tuple[str, str]]:
    """Return (weights, config) of each adapter in a draft, by default the names used by PEFT.

    Entries that the schema will reject are skipped; no path in a manifest is ever followed.
    """
    if not isinstance(stated, list):
        return [(WEIGHTS_PATH, CONFIG_PATH)]
    pairs = [(e.get("path"), e.get("config")) for e in stated if isinstance(e, dict)]
    return [
        (weights, config)
        for weights, config in pairs
        if isinstance(weights, str)
        and isinstance(config, str)
        and not (describe_name_problem(weights) or describe_name_problem(config))
    ]


def read_draft(directory: Path) -> JsonObject:
    """Return the existing ``expert.json``, or an empty object.

    Raises:
        InvalidPackageError: when it is not a JSON object.
    """
    found = find_source_file(directory, MANIFEST_PATH) if directory.is_dir() else None
    if found is None:
        return {}
    data = found.read(max_bytes=MAX_MANIFEST_BYTES)
    return load_object(data, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)


def complete_manifest(
    existing: JsonObject,
    overrides: ManifestOverrides,
    *,
    directory: Path,
    adapters: Sequence[AdapterFiles],
    base: BaseFacts | None,
) -> JsonObject:
    """Return the manifest with everything filled in that can be determined."""
    name = overrides.name or existing.get("name") or build_default_name(directory)
    document: JsonObject = {
        "schema": 1,
        "name": name,
        "version": DEFAULT_VERSION,
        "description": f"{_describe_adapters(adapters)} {str(name).partition('/')[2]}",
        "license": DEFAULT_LICENSE,
        **existing,
        **_list_given(overrides),
    }
    if overrides.source is not None:
        stated = existing.get("training")
        document["training"] = {
            **(stated if isinstance(stated, dict) else {}),
            "source": overrides.source,
        }
    label = adapters[0].config if adapters else None
    document["base"] = _complete_base(existing.get("base"), label, base)
    if adapters or "adapters" in existing:
        document["adapters"] = _complete_entries(existing.get("adapters"), adapters)
    return document


def _list_given(overrides: ManifestOverrides) -> JsonObject:
    """Return the fields of a manifest that the command line states."""
    given = asdict(replace(overrides, source=None))
    return {name: value for name, value in given.items() if value is not None}


def encode_manifest(document: JsonObject) -> bytes:
    """Serialise a manifest in our own format.

    Raises:
        InvalidPackageError: when it is longer than a manifest may be.
    """
    text = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    if len(text) > MAX_MANIFEST_BYTES:
        problem = f"{len(text)} bytes when it is complete, at most {MAX_MANIFEST_BYTES} allowed"
        raise InvalidPackageError(MANIFEST_PATH, [problem])
    return text


def build_default_name(directory: Path) -> str:
    """Return ``local/`` and a package name made from the directory's or its repository's name.

    Letters are transliterated to ASCII if possible.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", _to_ascii(_find_title(directory).lower()))
    slug = slug.strip("-")[:64].strip("-")
    return str(PackageName(DEFAULT_NAMESPACE, slug or "expert"))


def describe_lost_letters(
    directory: Path, existing: JsonObject, overrides: ManifestOverrides
) -> str | None:
    """Return a note if a default name lost letters without a counterpart in ASCII."""
    name = _find_title(directory)
    lost = [letter for letter in _to_ascii(name.lower()) if letter.isalnum() and letter > "\x7f"]
    if overrides.name or existing.get("name") or not lost:
        return None
    default = build_default_name(directory)
    return f"{default} is what remains of {name!r} in ASCII; set another name with `--name`"


def _find_title(directory: Path) -> str:
    """Return the name of a directory; in the hub cache, that of its repository."""
    return find_cached_name(directory) or directory.resolve().name


def _to_ascii(text: str) -> str:
    """Remove marks from Latin letters: ``ünï`` becomes ``uni``, ``straße`` ``strasse``.

    Letters of other scripts are kept.
    """
    decomposed = unicodedata.normalize("NFKD", text.translate(_ASCII_LETTERS))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def find_base_problems(document: JsonObject) -> list[str]:
    """Return what is unknown about the base, with a hint."""
    base = document.get("base")
    absent = [k for k in ("arch", "tokenizer") if not (isinstance(base, Mapping) and base.get(k))]
    if not absent:
        return []
    stated = base.get("name") if isinstance(base, Mapping) else None
    name = to_single_line(stated[:_MAX_LABEL]) if isinstance(stated, str) else None
    full = find_full_precision_label(name) if name is not None else None
    if full is not None:
        return [
            f"base {name} is a quantised copy of {full}, and neither is known here, so no digests "
            f"can be stated: {_hint_at_base(full)}"
        ]
    label = f"base {name}" if name else "the base"
    return [f"{label} is not known here, so its digests cannot be stated: {_hint_at_base(name)}"]


def _hint_at_base(label: str | None) -> str:
    """Return how to make a base known: by its name, if that may be one of a hub."""
    is_repository = label is not None and "/" in label and is_hub_name(label)
    return f"run `expertctl pull {label}`, or {BASE_HINT[4:]}" if is_repository else BASE_HINT


def _describe_adapters(adapters: Sequence[AdapterFiles]) -> str:
    kinds = dict.fromkeys(KIND_NAMES[adapter.spec.kind] for adapter in adapters)
    return f"{' and '.join(kinds)} adapter".lstrip()


def _complete_entries(stated: JsonValue, adapters: Sequence[AdapterFiles]) -> JsonValue:
    """Fill in what the files determine; the publisher's values are kept, and checked later."""
    if stated is None:
        return [_build_entry(adapter) for adapter in adapters]
    if not isinstance(stated, list):
        return stated
    found = {
        (adapter.weights_path, adapter.config_path): _build_entry(adapter) for adapter in adapters
    }
    return [_complete_entry(entry, found) for entry in stated]


def _complete_entry(entry: JsonValue, found: Mapping[tuple[str, str], JsonObject]) -> JsonValue:
    names = list_named_adapters([entry])
    return {**found.get(names[0], {}), **entry} if names and isinstance(entry, dict) else entry


def _build_entry(adapter: AdapterFiles) -> JsonObject:
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


def _complete_base(
    existing: object, config: AdapterConfig | None, base: BaseFacts | None
) -> JsonObject:
    """Fill in what is known about the base; the publisher's values are kept."""
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
            **_build_tokenizer_entry(
                identity, version if isinstance(version, int) else FORM_VERSION
            ),
        }
    if stated.get("tokenizer"):
        known.pop("tokenizer_version", None)
    return {**known, **stated}


def _build_tokenizer_entry(identity: BaseIdentity, version: int) -> JsonObject:
    if version == 1 or identity.canonical_tokenizer is None:
        return {"tokenizer": str(identity.tokenizer)}
    return {"tokenizer": str(identity.canonical_tokenizer), "tokenizer_version": FORM_VERSION}
