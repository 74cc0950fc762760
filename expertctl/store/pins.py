"""`VersionPins`: the exact versions that a project, or else the user's own list, names.

``expert.lock`` and ``experts.toml`` are read strictly by `expertctl.install`, which decides what is
installed. Here they only choose between installed versions, so they are read leniently: a file that
cannot be read pins no version, and `VersionPins.problems` says why.

Reading needs only the standard library: `list` must start fast.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from expertctl.digest import Digest
from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError
from expertctl.files import open_regular_file
from expertctl.reference import Constraint, PackageName, Reference, Version
from expertctl.settings import Home
from expertctl.store.disk import StatFingerprint, stat_fingerprint
from expertctl.store.refs import StoredExpert

PROJECT_FILE = "experts.toml"
LOCK_FILE = "expert.lock"
MAX_BYTES = 1 << 20
_MARKER = re.compile(r"^(<{7}|={7}|>{7})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VersionPin:
    """One exact version of a package, and the file that names it."""

    wanted: Reference
    source: Path

    def matches(self, expert: StoredExpert) -> bool:
        """Tell whether an installed expert is that version."""
        return allows_expert(expert, self.wanted)


@dataclass(frozen=True, slots=True)
class VersionPins:
    """The exact versions by package, and why a file was not read."""

    versions: Mapping[PackageName, VersionPin] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PinFiles:
    """The files that apply in one folder: those of its project, else the user's own list."""

    home: Home
    folder: Path | None = None

    @property
    def _user_list(self) -> Path:
        return self.home.root / PROJECT_FILE

    def read_fingerprints(self) -> tuple[StatFingerprint | None, ...]:
        """Return a value that changes when one of the files does."""
        paths = [self._user_list]
        if self.folder is not None:
            paths += [self.folder / PROJECT_FILE, self.folder / LOCK_FILE]
        return tuple(stat_fingerprint(str(path)) for path in paths)

    def read(self) -> VersionPins:
        """Read the pins; a locked version counts where the list allows it."""
        if self.folder is None or not is_project(self.folder, self.home):
            return _read_pins([self._user_list])
        return _read_pins([self.folder / PROJECT_FILE, self.folder / LOCK_FILE])


def is_project(folder: Path, home: Home) -> bool:
    """Tell whether a folder has a list of its own that is not the user's."""
    file = folder / PROJECT_FILE
    return file.is_file() and file.absolute() != home.root / PROJECT_FILE


def allows_expert(expert: StoredExpert, wanted: Reference) -> bool:
    """Tell whether a reference allows an installed expert."""
    return (
        expert.package == wanted.package
        and wanted.registry in {None, expert.registry}
        and wanted.allows(expert.version, expert.package_digest, expert.content_digest)
    )


def read_bounded_text(path: Path) -> str:
    """Return the text of a regular file of bounded size; a missing file is empty.

    Raises:
        InvalidPackageError: when it is too large, no text or no regular file.
    """
    try:
        with open_regular_file(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except NotFoundError:
        return ""
    if len(data) > MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {MAX_BYTES} bytes"])
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidPackageError(str(path), ["not UTF-8 text"]) from error


def parse_toml(text: str, *, what: str) -> dict[str, object]:
    """Parse TOML that a person or a merge may have damaged.

    Raises:
        InvalidPackageError: when it is not TOML; the markers of a merge are named.
    """
    if match := _MARKER.search(text):
        line = text.count("\n", 0, match.start()) + 1
        problem = f"line {line} is the marker of a merge conflict"
        hint = "choose one side in experts.toml, delete expert.lock, and run `expertctl lock`"
        raise InvalidPackageError(what, [problem], hint=hint)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib's own is a ValueError, among others
        raise InvalidPackageError(what, [f"not valid TOML: {error}"]) from error


def _read_pins(paths: list[Path]) -> VersionPins:
    listed: dict[PackageName, Reference] = {}
    pins: dict[PackageName, VersionPin] = {}
    problems = []
    for path in paths:
        try:
            document = parse_toml(read_bounded_text(path), what=str(path))
            if path.name == PROJECT_FILE:
                listed = {wanted.package: wanted for wanted in _iter_listed(document)}
                pins |= {p: VersionPin(w, path) for p, w in listed.items() if _is_exact(w)}
            else:
                fitting = [w for w in _iter_locked(document) if _is_in_list(w, listed)]
                pins |= {wanted.package: VersionPin(wanted, path) for wanted in fitting}
        except (ExpertError, OSError, _InvalidEntryError) as error:
            problems.append(f"{path} is ignored, as it cannot be read: {_error_cause(error)}")
    return VersionPins(pins, tuple(problems))


class _InvalidEntryError(Exception):
    """An entry of a file is malformed."""


def _error_cause(error: Exception) -> str:
    if isinstance(error, InvalidPackageError):
        return error.problems[0]
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _is_exact(wanted: Reference) -> bool:
    return wanted.constraint.pinned is not None or wanted.digest is not None


def _is_in_list(locked: Reference, listed: Mapping[PackageName, Reference]) -> bool:
    """Tell whether a list allows a locked version; it does where it does not name the package."""
    wanted, version = listed.get(locked.package), locked.constraint.pinned
    return wanted is None or version is None or wanted.constraint.allows(version)


def _iter_listed(document: Mapping[str, object]) -> Iterator[Reference]:
    experts = document.get("experts", {})
    if not isinstance(experts, dict):
        raise _InvalidEntryError("experts is not a table")
    for name, constraint in experts.items():
        yield Reference.parse(f"{name}@{constraint}")


def _iter_locked(document: Mapping[str, object]) -> Iterator[Reference]:
    entries = document.get("expert", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _InvalidEntryError("expert is not a list of tables")
    for entry in entries:
        try:
            name, version, content = entry["name"], entry["version"], entry["content_digest"]
        except KeyError as error:
            raise _InvalidEntryError(f"an expert has no {error}") from error
        yield Reference(
            PackageName.parse(str(name)),
            Constraint.for_version(Version.parse(str(version))),
            digest=Digest.parse(str(content)),
        )
