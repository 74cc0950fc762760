"""``experts.toml``: the experts that a project, or this user, wants.

::

    [experts]
    "acme/sql" = "^1.2"
    "hub.example/beta/chat" = "*"

    [registries]
    beta = "hub.example"

It is read strictly. It may come with another person's project, so it never adds trust and never
moves a namespace: a registry that it names must be known to the user already.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.files import make_folders, write_atomic
from expertctl.reference import PackageName, Reference
from expertctl.registry.address import RegistryAddress
from expertctl.store.locks import exclusive_lock
from expertctl.store.pins import LOCK_FILE, parse_toml, read_bounded_text

MAX_EXPERTS = 200
LOCK_SECONDS = 30.0
T = TypeVar("T")
_TABLES = {"experts", "registries"}
_HEADER = re.compile(r"^[ \t]*\[[ \t]*experts[ \t]*\][ \t]*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Project:
    """The content of ``experts.toml``."""

    experts: tuple[Reference, ...] = ()
    """Sorted by name, one per package."""
    registries: tuple[tuple[str, str], ...] = ()
    """Namespaces, and the registries that they come from."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> Self:
        """Parse the text of the file.

        Raises:
            InvalidPackageError: with every problem, when it is not such a file.
        """
        document = parse_toml(text, what=what)
        problems = [f"unknown table {key!r}" for key in document if key not in _TABLES]
        experts = _parse_table(document, "experts", _parse_expert, problems)
        registries = _parse_table(document, "registries", _parse_registry, problems)
        names = [reference.package for reference in experts]
        problems += [
            f"{name} is there twice" for name in sorted(set(names)) if names.count(name) > 1
        ]
        if len(experts) > MAX_EXPERTS:
            problems.append(f"more than {MAX_EXPERTS} experts")
        if problems:
            raise InvalidPackageError(what, problems, hint='in [experts]: "acme/sql" = "^1.2"')
        mapping = dict(registries)
        located = [_with_registry(reference, mapping) for reference in experts]
        return cls(tuple(sorted(located, key=lambda r: r.package)), tuple(sorted(registries)))

    def find(self, package: PackageName) -> Reference | None:
        """Return the reference to a package, if it is wanted."""
        return next((r for r in self.experts if r.package == package), None)

    def with_wanted(self, references: Iterable[Reference]) -> Self:
        """Return the same with other references to some packages, as after `ProjectFile.update`."""
        wanted = {reference.package: self.with_registry(reference) for reference in references}
        kept = [r for r in self.experts if r.package not in wanted]
        experts = sorted([*kept, *wanted.values()], key=lambda r: r.package)
        return replace(self, experts=tuple(experts))

    def with_registry(self, wanted: Reference) -> Reference:
        """Return a reference with the registry that the file gives to its namespace."""
        return _with_registry(wanted, dict(self.registries))


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """One ``experts.toml`` and the lock file beside it."""

    path: Path
    lock_file: Path
    """The lock held while the file is changed; it lies in the user's home, not in the project."""

    @property
    def lock_path(self) -> Path:
        """The path of its lock file."""
        return self.path.with_name(LOCK_FILE)

    def exists(self) -> bool:
        """Tell whether the file exists."""
        return self.path.is_file()

    def read(self) -> Project:
        """Read the file; a missing one wants nothing.

        Raises:
            InvalidPackageError: when it is not such a file.
        """
        return Project.parse(read_bounded_text(self.path), what=str(self.path))

    def update(self, references: Mapping[PackageName, Reference]) -> None:
        """Write the references to some packages, replacing present ones; everything else stays.

        Raises:
            InvalidPackageError: when the file cannot be read, or is written in an unusual way.
        """
        self._rewrite(
            {package: _format_line(reference) for package, reference in references.items()}
        )

    def remove(self, package: PackageName) -> bool:
        """Remove a package from the list; tell whether it was there.

        Raises:
            InvalidPackageError: when the file cannot be read, or is written in an unusual way.
        """
        if self.read().find(package) is None:
            return False
        self._rewrite({package: ""})
        return True

    def _rewrite(self, lines: Mapping[PackageName, str]) -> None:
        make_folders(self.lock_file.parent, mode=0o700)
        with exclusive_lock(self.lock_file, seconds=LOCK_SECONDS):
            before, text = self.read(), read_bounded_text(self.path)
            for package, line in lines.items():
                text = _replace_line(text, package, line)
            self._check_meaning(before, text, lines)
            write_atomic(self.path, text.encode("utf-8"))

    def _check_meaning(self, before: Project, text: str, lines: Mapping[PackageName, str]) -> None:
        """Require that a line-wise change did what it should and nothing else."""
        added = "".join(line for line in lines.values() if line)
        wanted = Project.parse(f"[experts]\n{added}", what=str(self.path)).experts
        kept = tuple(r for r in before.experts if r.package not in lines)
        try:
            found = Project.parse(text, what=str(self.path))
        except InvalidPackageError:
            found = Project()
        if {str(r) for r in found.experts} != {
            str(_with_registry(r, dict(before.registries))) for r in (*kept, *wanted)
        } or found.registries != before.registries:
            problems = ["it is written in a way that cannot be changed line by line"]
            raise InvalidPackageError(str(self.path), problems, hint="edit it by hand")


def _parse_table(
    document: Mapping[str, object],
    table: str,
    read: Callable[[str, str], T],
    problems: list[str],
) -> list[T]:
    rows = document.get(table, {})
    if not isinstance(rows, dict):
        problems.append(f"{table} is not a table")
        return []
    found = []
    for key, value in rows.items():
        try:
            if not isinstance(value, str):
                raise UsageError("its value is not text")
            found.append(read(key, value))
        except ExpertError as error:
            problems.append(f"[{table}] {key[:80]!r}: {error.message}")
    return found


def _parse_expert(name: str, constraint: str) -> Reference:
    if "@" in name:
        raise UsageError("a name holds no '@'")
    return Reference.parse(f"{name}@{constraint}")


def _parse_registry(namespace: str, host: str) -> tuple[str, str]:
    PackageName.parse(f"{namespace}/any")
    return namespace, RegistryAddress.parse(host, allow_http=True).host


def _with_registry(reference: Reference, registries: Mapping[str, str]) -> Reference:
    """Return a reference with the registry that the file gives to its namespace."""
    host = reference.registry or registries.get(reference.package.namespace)
    return Reference(reference.package, reference.constraint, host, reference.digest)


def _format_line(reference: Reference) -> str:
    name, _, constraint = str(reference).partition("@")
    return f'"{name}" = "{constraint or "*"}"\n'


def _replace_line(text: str, package: PackageName, line: str) -> str:
    pattern = re.compile(
        rf'^[ \t]*"(?:[^"/\n]*/)?{re.escape(str(package))}"[ \t]*=.*(?:\n|\Z)', re.MULTILINE
    )
    if pattern.search(text):
        return pattern.sub(lambda _: line, text, count=1)
    header = _HEADER.search(text)
    if header is not None:
        end = header.end()
        return f"{text[:end]}\n{line}{text[end:].removeprefix(chr(10))}"
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{gap}[experts]\n{line}"
