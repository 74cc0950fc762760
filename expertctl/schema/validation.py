"""Validating documents: JSON Schemas, conversion to dataclasses, and files of JSON Lines.

The schemas (draft 2020-12) are shipped in the wheel; validation reports all problems at once. In
files of JSON Lines each line is one object of a schema; problems have line numbers, and after
``MAX_PROBLEMS`` the rest of the file is skipped.

msgspec 0.22 prepares a class on first use and exposes it half prepared to other threads: two first
uses at once crashed the process with a segmentation fault when several packages were installed. So
each class is prepared under a lock before any thread uses it.
"""

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.files import open_regular_file
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

if TYPE_CHECKING:  # a run that reads no document with a schema does not import it
    import jsonschema_rs

_Kind = TypeVar("_Kind")
_prepared_types: set[object] = set()
_prepare_lock = threading.Lock()


def convert_document(document: object, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """Convert parsed JSON to a type.

    Raises:
        msgspec.ValidationError: when it does not have that shape.
    """
    _prepare_type(kind)
    return msgspec.convert(document, kind, strict=strict)


def decode_json(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """Decode JSON text to a type.

    Raises:
        msgspec.DecodeError: when it is not JSON, or does not have that shape.
    """
    _prepare_type(kind)
    return msgspec.json.decode(data, type=kind)


def _prepare_type(kind: object) -> None:
    if kind in _prepared_types:
        return
    with _prepare_lock:
        msgspec.json.Decoder(kind)
        _prepared_types.add(kind)


_PACKAGE = Path(__file__).parent.parent
MAX_PROBLEMS = 50
MAX_PROBLEM_LENGTH = 300
"""How many characters of a location, and of its problem, are shown."""
LARGE_DOCUMENT_VALUES = 20_000
"""In a document with more values than this, only the first problem is reported.

All problems are collected before the first is returned, and each takes kilobytes: those of a
hostile document of some megabytes would take all memory.
"""
_MORE = "… and more"


def find_schema(name: str) -> Path:
    """Return the path of a schema: in the installed package, else in the checkout."""
    shipped = _PACKAGE / "_schemas" / f"{name}.schema.json"
    return shipped if shipped.exists() else _PACKAGE.parent / "schemas" / f"{name}.schema.json"


def find_problems(document: JsonValue, schema: str) -> list[str]:
    """Return at most ``MAX_PROBLEMS`` problems of a document; empty when it is valid."""
    validator = _load_validator(schema)
    if validator.is_valid(document):
        return []
    if _is_large(document):
        return [*_find_first_problem(validator, document), _MORE]
    problems: list[str] = []
    for error in validator.iter_errors(document):
        if len(problems) == MAX_PROBLEMS:
            return [*problems, _MORE]
        problems.append(_format_problem(error))
    return problems


def _find_first_problem(
    validator: "jsonschema_rs.Draft202012Validator", document: JsonValue
) -> Iterator[str]:
    import jsonschema_rs

    try:
        validator.validate(document)
    except jsonschema_rs.ValidationError as error:
        yield _format_problem(error)


def _is_large(document: JsonValue) -> bool:
    left, seen = [document], 0
    while left:
        value = left.pop()
        inside = value.values() if isinstance(value, dict) else value
        if isinstance(inside, str) or not isinstance(inside, Collection):
            continue
        seen += len(inside)
        if seen > LARGE_DOCUMENT_VALUES:
            return True
        left.extend(inside)
    return False


def _format_problem(error: "jsonschema_rs.ValidationError") -> str:
    where = "/".join(str(part) for part in error.instance_path) or "document"
    return f"{where[:MAX_PROBLEM_LENGTH]}: {shorten_middle(error.message)}"


def shorten_middle(message: str) -> str:
    """Cut out the middle: the value is at the beginning, the problem at the end."""
    if len(message) <= MAX_PROBLEM_LENGTH:
        return message
    return f"{message[: MAX_PROBLEM_LENGTH // 2]}…{message[-MAX_PROBLEM_LENGTH // 2 + 1 :]}"


@cache
def _load_validator(name: str) -> "jsonschema_rs.Draft202012Validator":
    import jsonschema_rs

    schema = json.loads(find_schema(name).read_text(encoding="utf-8"))
    return jsonschema_rs.Draft202012Validator(schema)


MAX_DATA_BYTES = 64 << 20
MAX_LINE_BYTES = 8 << 20
MAX_LINES = 100_000


def read_json_lines(path: Path) -> bytes:
    """Return at most ``MAX_DATA_BYTES`` + 1 bytes of a file.

    Raises:
        NotFoundError: when the file cannot be read.
    """
    try:
        with open_regular_file(path) as stream:
            return stream.read(MAX_DATA_BYTES + 1)
    except OSError as error:
        hint = "name a readable file of JSON lines"
        raise NotFoundError(f"{path}: {error.strerror or error}", hint=hint) from error


class JsonLinesReader:
    """Parses the lines of a file and collects their problems."""

    def __init__(
        self, what: str, *, schema: str, hint: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Set the name of the file, the schema and an example of its lines, and key aliases."""
        self.what, self.schema, self.hint, self.aliases = what, schema, hint, aliases or {}
        self._problems: list[str] = []

    def read(self, data: bytes) -> Iterator[tuple[int, JsonObject]]:
        """Yield (line number, object) for each valid line; problems go to `raise_problems`.

        Raises:
            InvalidPackageError: before the first line, when there are none or too many.
        """
        text = data.removesuffix(b"\n")
        self._check_size(data, lines=text.count(b"\n") + 1)
        for number, line in enumerate(text.split(b"\n"), start=1):
            if len(self._problems) > MAX_PROBLEMS:
                return
            document = self._parse_line(number, line)
            if document is not None:
                yield number, document

    def add_problems(self, number: int, *problems: str) -> None:
        """Add problems of a line."""
        self._problems += [f"line {number}: {problem}" for problem in problems]

    def check_duplicate_ids(self, ids: Iterable[tuple[int, str | None]]) -> None:
        """Add a problem for each duplicate among (line, id) pairs."""
        first: dict[str, int] = {}
        for line, name in ids:
            if name is not None and first.setdefault(name, line) != line:
                self.add_problems(line, f"id {name!r} is already used on line {first[name]}")

    def raise_problems(self) -> None:
        """Report all problems.

        Raises:
            InvalidPackageError: with the problems of all lines.
        """
        found = self._problems
        shown = found if len(found) <= MAX_PROBLEMS else [*found[:MAX_PROBLEMS], "… and more"]
        if found:
            raise InvalidPackageError(self.what, shown, hint=self.hint)

    def _check_size(self, data: bytes, *, lines: int) -> None:
        if not data.strip():
            self._problems.append("it is empty: there is nothing to evaluate")
        if len(data) > MAX_DATA_BYTES:
            self._problems.append(f"more than {MAX_DATA_BYTES >> 20} MiB")
        if lines > MAX_LINES:
            self._problems.append(f"{lines} lines, at most {MAX_LINES} are allowed")
        self.raise_problems()

    def _parse_line(self, number: int, line: bytes) -> JsonObject | None:
        try:
            document = load_object(line, what=f"line {number}", max_bytes=MAX_LINE_BYTES)
        except InvalidPackageError as error:
            self.add_problems(number, *(error.problems if line.strip() else ("it is blank",)))
            return None
        for alias, name in self.aliases.items():
            if alias in document and name not in document:
                document[name] = document.pop(alias)
        problems = find_problems(document, self.schema)
        self.add_problems(number, *problems)
        return None if problems else document


def warn_repeated(path: Path, prompts: Iterable[tuple[int, object]]) -> tuple[str, ...]:
    """Warn of duplicates among (line, prompt) pairs, as each of them counts."""
    first: dict[object, int] = {}
    again: list[tuple[int, int]] = []
    for line, prompt in prompts:
        earlier = first.setdefault(prompt, line)
        if earlier != line:
            again.append((earlier, line))
    if not again:
        return ()
    count = "1 prompt is" if len(again) == 1 else f"{len(again)} prompts are"
    earlier, later = again[0]
    return (f"{path}: {count} repeated, the first on line {later}, from line {earlier}",)
