"""Files of JSON Lines that people write: bounded, read strictly, all problems told at once.

Each line is one object of a schema. A problem names its line; after ``MAX_PROBLEMS`` the rest of
the file is passed over.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.regular_file import open_regular
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import MAX_PROBLEMS, problems_of

MAX_DATA_BYTES = 64 << 20
MAX_LINE_BYTES = 8 << 20
MAX_LINES = 100_000


def read_lines(path: Path) -> bytes:
    """Return the bytes of a file, up to one more than are allowed.

    Raises:
        NotFoundError: when the file cannot be read.
    """
    try:
        with open_regular(path) as stream:
            return stream.read(MAX_DATA_BYTES + 1)
    except OSError as error:
        hint = "name a file of JSON lines that you may read"
        raise NotFoundError(f"{path}: {error.strerror or error}", hint=hint) from error


class JsonLines:
    """The lines of a file, and what is wrong with them."""

    def __init__(
        self, what: str, *, schema: str, hint: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Name the file, the schema of its lines, what one looks like, and other names of keys."""
        self.what, self.schema, self.hint, self.aliases = what, schema, hint, aliases or {}
        self._problems: list[str] = []

    def read(self, data: bytes) -> Iterator[tuple[int, JsonObject]]:
        """Yield the number of each good line and its object; problems are kept for `check`.

        Raises:
            InvalidPackageError: before the first line, when there are none or too many.
        """
        text = data.removesuffix(b"\n")
        self._check_size(data, lines=text.count(b"\n") + 1)
        for number, line in enumerate(text.split(b"\n"), start=1):
            if len(self._problems) > MAX_PROBLEMS:
                return
            document = self._object(number, line)
            if document is not None:
                yield number, document

    def complain(self, number: int, *problems: str) -> None:
        """Remember what else is wrong with a line."""
        self._problems += [f"line {number}: {problem}" for problem in problems]

    def check_ids(self, ids: Iterable[tuple[int, str | None]]) -> None:
        """Remember which ids come twice; each comes with its line."""
        first: dict[str, int] = {}
        for line, name in ids:
            if name is not None and first.setdefault(name, line) != line:
                self.complain(line, f"id {name!r} is that of line {first[name]} already")

    def check(self) -> None:
        """End the reading.

        Raises:
            InvalidPackageError: with the problems of all lines.
        """
        found = self._problems
        shown = found if len(found) <= MAX_PROBLEMS else [*found[:MAX_PROBLEMS], "… and more"]
        if found:
            raise InvalidPackageError(self.what, shown, hint=self.hint)

    def _check_size(self, data: bytes, *, lines: int) -> None:
        """Refuse too many lines before any of them becomes an object."""
        if not data.strip():
            self._problems.append("it is empty: there is nothing to evaluate")
        if len(data) > MAX_DATA_BYTES:
            self._problems.append(f"more than {MAX_DATA_BYTES >> 20} MiB")
        if lines > MAX_LINES:
            self._problems.append(f"{lines} lines, at most {MAX_LINES} are allowed")
        self.check()

    def _object(self, number: int, line: bytes) -> JsonObject | None:
        try:
            document = load_object(line, what=f"line {number}", max_bytes=MAX_LINE_BYTES)
        except InvalidPackageError as error:
            self.complain(number, *(error.problems if line.strip() else ("it is blank",)))
            return None
        for alias, name in self.aliases.items():
            if alias in document and name not in document:
                document[name] = document.pop(alias)
        problems = problems_of(document, self.schema)
        self.complain(number, *problems)
        return None if problems else document


def repeated(path: Path, prompts: Iterable[tuple[int, object]]) -> tuple[str, ...]:
    """Warn of prompts that count more than once; each comes with its line."""
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
