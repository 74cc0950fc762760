"""``experts.toml``, the experts that a project or this user wants, and its lock ``expert.lock``.

::

    [experts]
    "acme/sql" = "^1.2"
    "hub.example/beta/chat" = "*"

    [registries]
    beta = "hub.example"

It is read strictly. It may come with another person's project, so it never adds trust and never
moves a namespace: a registry that it names must be known to the user already.

``expert.lock`` names the exact versions that these were resolved to. It is written by
`expertctl lock` and kept with the project. Reading is strict: it is TOML, so that a person can read
a change, but it has exactly one form, sorted, with every field present.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
)
from expertctl.files import make_folders, write_atomic
from expertctl.install.resolve import LockedVersion, ResolvedPackage
from expertctl.package.read import VersionContent
from expertctl.reference import Constraint, PackageName, Reference, Version
from expertctl.registry.address import RegistryAddress
from expertctl.store.locks import exclusive_lock
from expertctl.store.pins import LOCK_FILE, parse_toml, read_bounded_text
from expertctl.store.refs import LOCAL

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
    document: Mapping[str, object], table: str, read: Callable[[str, str], T], problems: list[str]
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


FORMAT = 1
_RELOCK_HINT = "delete it, and `expertctl lock` writes it anew"
_LOCK_HEADER = "# Written by `expertctl lock`; change experts.toml instead.\n"
_KEYS = ("name", "version", "registry", "package_digest", "content_digest", "base", "requires")


@dataclass(frozen=True, slots=True)
class LockedExpert:
    """One expert of a lock file."""

    package: PackageName
    version: Version
    registry: str
    package_digest: Digest
    content_digest: Digest
    base: str
    requires: tuple[Reference, ...]

    @classmethod
    def from_chosen(cls, chosen: ResolvedPackage) -> Self:
        """Return the entry for a resolved package."""
        candidate = chosen.candidate
        return cls(
            candidate.package,
            candidate.version,
            candidate.registry,
            chosen.package_digest,
            candidate.content_digest,
            candidate.base,
            candidate.requires,
        )

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.package}@{self.version}"

    @property
    def reference(self) -> Reference:
        """Exactly this version, from its registry."""
        host = None if self.registry == LOCAL else self.registry
        return Reference(self.package, Constraint.for_version(self.version), host)

    @property
    def pin(self) -> LockedVersion:
        """The preference for the resolver."""
        return LockedVersion(self.version, self.content_digest)

    def satisfies(self, wanted: Reference) -> bool:
        """Tell whether this is what a reference asks for."""
        return (
            self.package == wanted.package
            and wanted.registry in {None, self.registry}
            and wanted.allows(self.version, self.package_digest, self.content_digest)
        )


@dataclass(frozen=True, slots=True)
class LockFile:
    """The content of a lock file: the requests, and the versions they were resolved to."""

    wanted: tuple[str, ...]
    """The references of experts.toml, sorted."""
    experts: tuple[LockedExpert, ...]
    """Sorted by name, one per package."""

    @classmethod
    def from_resolution(cls, project: Project, chosen: Iterable[ResolvedPackage]) -> Self:
        """Return the lock of a project's resolution."""
        experts = sorted(map(LockedExpert.from_chosen, chosen), key=lambda locked: locked.package)
        return cls(_list_wanted(project), tuple(experts))

    @classmethod
    def parse(cls, text: str, *, what: str) -> Self:
        """Parse the text of the file.

        Raises:
            InvalidPackageError: when it is not exactly what `encode` writes.
        """
        document = parse_toml(text, what=what)
        found = document.get("format")
        if found != FORMAT:
            problem = f"its format is {str(found)[:20]!r}, this version reads {FORMAT}"
            raise InvalidPackageError(what, [problem], hint=f"update expertctl, or {_RELOCK_HINT}")
        try:
            lock = cls(
                _parse_texts(document.get("wanted")), _parse_experts(document.get("expert", []))
            )
        except (ExpertError, _InvalidLockError) as error:
            raise InvalidPackageError(what, [str(error)], hint=_RELOCK_HINT) from error
        if normalise_toml(lock.encode()) != normalise_toml(text):
            problem = "it holds something that `expertctl lock` does not write"
            raise InvalidPackageError(what, [problem], hint=_RELOCK_HINT)
        return lock

    def encode(self) -> str:
        """Return the text of the file; equal locks have equal text."""
        wanted = "".join(f"  {_quote(text)},\n" for text in self.wanted)
        head = f"{_LOCK_HEADER}format = {FORMAT}\nwanted = [\n{wanted}]\n"
        return head + "".join(map(_encode_table, self.experts))

    @property
    def contents(self) -> dict[str, VersionContent]:
        """The content of each locked version by its ref; the file does not say who signed it."""
        return {e.ref: VersionContent(LOCK_FILE, e.content_digest) for e in self.experts}

    def find(self, package: PackageName) -> LockedExpert | None:
        """Return the locked version of a package."""
        return next((locked for locked in self.experts if locked.package == package), None)

    def check_current(self, project: Project, *, what: str) -> None:
        """Require that this is the lock of that project: nothing missing, nothing extra.

        Raises:
            ConflictError: naming every difference.
        """
        problems = list(self._find_differences(project))
        if problems:
            one = len(problems) == 1
            lines = f" {problems[0]}" if one else "".join(f"\n  - {p}" for p in problems)
            hint = "`expertctl lock` brings it up to date, `expertctl install` also installs"
            raise ConflictError(f"{what} does not fit experts.toml:{lines}", hint=hint)

    def _find_differences(self, project: Project) -> Iterable[str]:
        needed = {reference.package for reference in project.experts}
        for reference in project.experts:
            yield from self._find_unmet(reference, "experts.toml asks")
        for locked in self.experts:
            for reference in locked.requires:
                needed.add(reference.package)
                if reference.package != locked.package:
                    yield from self._find_unmet(reference, f"{locked.ref} requires")
        for locked in self.experts:
            if locked.package not in needed:
                yield f"nothing needs {locked.ref}"
        if set(self.wanted) != set(_list_wanted(project)):
            yield "it was made for another experts.toml"

    def _find_unmet(self, wanted: Reference, who: str) -> Iterable[str]:
        locked = self.find(wanted.package)
        if locked is None:
            yield f"{who} {wanted}, which is not locked"
        elif not locked.satisfies(wanted):
            yield f"{who} {wanted}, locked is {locked.ref}"


class _InvalidLockError(Exception):
    """A field has a wrong type or value."""


def read_lock(path: Path) -> LockFile | None:
    """Read a lock file; None when there is none.

    Raises:
        InvalidPackageError: when it is damaged, edited or of a later version.
    """
    text = read_bounded_text(path)
    return LockFile.parse(text, what=str(path)) if text or path.exists() else None


def require_lock(path: Path) -> LockFile:
    """Read a lock file that must exist.

    Raises:
        NotFoundError: when there is none.
        InvalidPackageError: when it is damaged, edited or of a later version.
    """
    lock = read_lock(path)
    if lock is None:
        raise NotFoundError(f"{path}: no such file", hint="`expertctl lock` writes it")
    return lock


def write_lock(path: Path, lock: LockFile) -> bool:
    """Write a lock file unless it has that content already; tell whether it was written."""
    text = lock.encode()
    if path.is_file() and read_bounded_text(path) == text:
        return False
    write_atomic(path, text.encode("utf-8"))
    return True


def normalise_toml(text: str) -> str:
    """Return a text without what an editor may change unasked: spaces at line ends."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _list_wanted(project: Project) -> tuple[str, ...]:
    return tuple(sorted(str(reference) for reference in project.experts))


def _encode_table(locked: LockedExpert) -> str:
    values = {
        "name": str(locked.package),
        "version": str(locked.version),
        "registry": locked.registry,
        "package_digest": str(locked.package_digest),
        "content_digest": str(locked.content_digest),
        "base": locked.base,
    }
    lines = "".join(f"{key} = {_quote(value)}\n" for key, value in values.items())
    requires = ", ".join(_quote(str(reference)) for reference in locked.requires)
    return f"\n[[expert]]\n{lines}requires = [{requires}]\n"


def _quote(text: str) -> str:
    """Return a basic TOML string; JSON's escapes are valid in it."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _parse_experts(value: object) -> tuple[LockedExpert, ...]:
    if not isinstance(value, list):
        raise _InvalidLockError("expert is not a list of tables")
    experts = tuple(_parse_locked(entry) for entry in value)
    names = [locked.package for locked in experts]
    if names != sorted(set(names)):
        raise _InvalidLockError("its experts are not sorted, each once")
    return experts


def _parse_locked(entry: object) -> LockedExpert:
    if not isinstance(entry, dict) or set(entry) != set(_KEYS):
        raise _InvalidLockError(f"an expert has not exactly the fields {', '.join(_KEYS)}")
    text = {key: _parse_text(entry[key], key) for key in _KEYS[:-1]}
    return LockedExpert(
        PackageName.parse(text["name"]),
        Version.parse(text["version"]),
        _parse_host(text["registry"]),
        Digest.parse(text["package_digest"]),
        Digest.parse(text["content_digest"]),
        text["base"],
        tuple(map(Reference.parse, _parse_texts(entry["requires"]))),
    )


def _parse_host(text: str) -> str:
    if text == LOCAL:
        return text
    host = RegistryAddress.parse(text, allow_http=True).host
    if host != text:
        raise _InvalidLockError(f"registry {text[:80]!r} is not the host of a registry")
    return host


def _parse_text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 256:
        raise _InvalidLockError(f"{key} is not text")
    return value


def _parse_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _InvalidLockError("a list of texts is not one")
    return tuple(_parse_text(item, "an entry of a list") for item in value)


def describe_changes(before: Sequence[LockedExpert], after: Sequence[LockedExpert]) -> list[str]:
    """Return the differences between two locks, one line each."""
    old, new = ({locked.package: locked for locked in side} for side in (before, after))
    lines = []
    for package in sorted({*old, *new}):
        if package not in old:
            lines.append(f"+ {new[package].ref}")
        elif package not in new:
            lines.append(f"- {old[package].ref}")
        elif old[package] != new[package]:
            was, now = old[package], new[package]
            detail = "" if was.version != now.version else " (another signed form)"
            lines.append(f"~ {was.ref} -> {now.version}{detail}")
    return lines
