"""Names, versions and constraints: the only parser of references; who owns a namespace.

Grammar: ``[registry-host/]namespace/name[@constraint]``. Versions are strict semver 2.0 without
build metadata; constraints are ``1.2.0``, ``^1.2``, ``~1.2``, ``>=1,<2`` and ``*``. In place of a
constraint, ``sha256:<hex>`` names exact bytes: the digest of a package or of its content.

The functions at the end say which registries a namespace belongs to, and whose grants and
revocations apply to a package.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import total_ordering
from ipaddress import IPv6Address, ip_address
from typing import Self

from expertctl.digest import Digest
from expertctl.errors import UsageError

MAX_LENGTH = 256
FROM_FILE = "local"
"""The registry host of packages that came from a file."""
DEMO_BASE = "starter/base"
"""The name of the demo base, which the first run of a new home adds."""
NAME_PATTERN = r"[a-z0-9]+(-[a-z0-9]+)*"
_NAME = re.compile(NAME_PATTERN)
_HOST = re.compile(
    r"(?=.{1,128}\Z)([a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*|\[[0-9a-fA-F:]+\])(?::([0-9]{1,5}))?"
)
_LOCAL = re.compile(r"([a-z0-9-]+\.)*localhost")
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_IDENTIFIER = r"(0|[1-9][0-9]{0,8}|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?")
_PARTIAL = re.compile(rf"{_NUMBER}(?:\.{_NUMBER})?(?:\.{_NUMBER})?")
_OPERATOR = re.compile(r"(>=|<=|>|<|=)? *(\S+)")


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """A semver version; ordered as in semver 2.0 section 11."""

    major: int
    minor: int
    patch: int
    prerelease: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``X.Y.Z[-prerelease]``.

        Raises:
            UsageError: for anything else, build metadata and leading zeros included.
        """
        match = _VERSION.fullmatch(text) if len(text) <= MAX_LENGTH else None
        if match is None:
            raise UsageError(f"{text[:80]!r} is not a version such as 1.2.0 or 1.2.0-rc.1")
        major, minor, patch, prerelease = match.group(1, 2, 3, 4)
        parts = tuple(prerelease.split(".")) if prerelease else ()
        return cls(int(major), int(minor), int(patch), parts)

    def __str__(self) -> str:
        """Return the canonical text."""
        tail = f"-{'.'.join(self.prerelease)}" if self.prerelease else ""
        return f"{self.major}.{self.minor}.{self.patch}{tail}"

    @property
    def release(self) -> tuple[int, int, int]:
        """The version without its prerelease part."""
        return (self.major, self.minor, self.patch)

    def __lt__(self, other: "Version") -> bool:
        """Order by precedence."""
        return self._key() < other._key()

    def _key(self) -> tuple[int, int, int, bool, tuple[tuple[bool, int, str], ...]]:
        identifiers = tuple(
            (not p.isdigit(), int(p) if p.isdigit() else 0, "" if p.isdigit() else p)
            for p in self.prerelease
        )
        return (self.major, self.minor, self.patch, not self.prerelease, identifiers)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A set of versions, as a conjunction of comparisons; no comparison means any version."""

    text: str
    bounds: tuple[tuple[str, Version], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a constraint.

        Raises:
            UsageError: for anything outside the grammar.
        """
        if text == "*":
            return cls(text, ())
        bounds: list[tuple[str, Version]] = []
        for part in text.split(","):
            bounds += _parse_bounds(part.strip(" "), text)
        return cls(text, tuple(bounds))

    def allows(self, version: Version) -> bool:
        """Return whether ``version`` is in the set; a prerelease only if its release is named."""
        named = {b.release for _, b in self.bounds if b.prerelease}
        if version.prerelease and version.release not in named:
            return False
        return all(_compare(version, operator, bound) for operator, bound in self.bounds)

    @property
    def pinned(self) -> Version | None:
        """The only version that is allowed, if the constraint is an exact version."""
        operators = [operator for operator, _ in self.bounds]
        return self.bounds[0][1] if operators == ["="] else None

    @classmethod
    def for_version(cls, version: Version) -> Self:
        """Return the constraint that allows only this version."""
        return cls(str(version), (("=", version),))

    def __str__(self) -> str:
        """Return the text that was parsed."""
        return self.text


ANY = Constraint("*", ())


@dataclass(frozen=True, slots=True, order=True)
class PackageName:
    """``namespace/name``."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``namespace/name``.

        Raises:
            UsageError: when it is not two names of lower-case letters, digits and single dashes.
        """
        namespace, _, name = text.partition("/")
        fits = len(namespace) <= 64 and len(name) <= 64
        if not (fits and _NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            raise UsageError(
                f"{text[:80]!r} is not a package name",
                hint="names look like acme/sql-gen: lower-case letters, digits, single dashes",
                unknown_name=text,
            )
        return cls(namespace, name)

    def __str__(self) -> str:
        """Return ``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Reference:
    """A package, optionally a registry, and the acceptable versions."""

    package: PackageName
    constraint: Constraint = ANY
    registry: str | None = None
    digest: Digest | None = None
    """Of the package or of its content; then any version is acceptable."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``[registry-host/]namespace/name[@constraint|@sha256:<hex>]``.

        Raises:
            UsageError: for anything outside the grammar.
        """
        if len(text) > MAX_LENGTH:
            message = f"{text[:40]!r}… is too long for a reference"
            raise UsageError(message, hint="references look like acme/sql-gen@^1.2")
        path, at, constraint = text.partition("@")
        registry, _, rest = path.partition("/")
        host = _parse_host(registry, text) if "/" in rest else None
        if at and not constraint:
            hint = f"{path}@1.2.0, {path}@^1, or {path} alone"
            raise UsageError(f"{text!r} has nothing after '@'", hint=hint)
        by_digest = constraint.startswith("sha256:")
        return cls(
            PackageName.parse(rest if host else path),
            Constraint.parse(constraint) if at and not by_digest else ANY,
            host,
            Digest.parse_input(constraint) if by_digest else None,
        )

    def allows(self, version: Version, *digests: Digest) -> bool:
        """Return whether a version with these digests (package, content) is acceptable."""
        return self.constraint.allows(version) and self.digest in {None, *digests}

    def __str__(self) -> str:
        """Return the reference as the user would type it."""
        host = f"{self.registry}/" if self.registry else ""
        limit = self.digest or self.constraint
        tail = "" if limit == ANY else f"@{limit}"
        return f"{host}{self.package}{tail}"


Target = Reference | Digest
"""The name of an expert: a reference, or its content or package digest."""


def parse_target(text: str) -> Target:
    """Parse how the user names an expert: a reference, or ``sha256:<hex>``.

    Raises:
        UsageError: when the text is neither.
    """
    return Digest.parse_input(text) if text.startswith("sha256:") else Reference.parse(text)


def is_loopback(hostname: str) -> bool:
    """Return whether a host name, or an address without brackets, is this machine."""
    if _LOCAL.fullmatch(hostname):
        return True
    try:
        return ip_address(hostname).is_loopback
    except ValueError:
        return False


def _parse_host(text: str, whole: str) -> str:
    """Return the canonical spelling of a host, as `expertctl.registry.address` does."""
    match = _HOST.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        name = match[1].lower().strip("[]")
        bare = IPv6Address(name).compressed if match[1][0] == "[" else name
    except ValueError as error:
        hint = "a reference is HOST/namespace/name, without https:// and without a path"
        raise UsageError(f"{text!r} in {whole!r} is not a registry host", hint=hint) from error
    local = is_loopback(bare)
    port = int(match[3]) if match[3] else (80 if local else 443)
    shown = f"[{bare}]" if ":" in bare else bare
    return shown if port == 443 and not local else f"{shown}:{port}"


def _parse_bounds(part: str, whole: str) -> list[tuple[str, Version]]:
    if part[:1] in {"^", "~"}:
        return _parse_range(part[0], part[1:], whole)
    match = _OPERATOR.fullmatch(part)
    if match is None:
        raise _build_constraint_error(whole)
    operator, number = match.group(1) or "=", match.group(2)
    if _VERSION.fullmatch(number):
        return [(operator, Version.parse(number))]
    if operator == "=":
        return _parse_range("=", number, whole)
    numbers = _parse_partial(number, whole)
    return [_build_partial_bound(operator, numbers)]


def _parse_range(operator: str, text: str, whole: str) -> list[tuple[str, Version]]:
    if _VERSION.fullmatch(text):
        low = Version.parse(text)
        numbers = [low.major, low.minor, low.patch]
    else:
        numbers = _parse_partial(text, whole)
        low = _pad(numbers)
    fixed = _count_fixed(operator, numbers)
    high = [*numbers[: fixed - 1], numbers[fixed - 1] + 1]
    return [(">=", low), ("<", _pad(high))]


def _build_partial_bound(operator: str, numbers: list[int]) -> tuple[str, Version]:
    """Return the bound for a partial version, as cargo reads it.

    ``>1`` means above every 1.x, and ``<=1`` up to the last of them.
    """
    if operator in {">", "<="}:
        beyond = _pad([*numbers[:-1], numbers[-1] + 1])
        return (">=" if operator == ">" else "<", beyond)
    return (operator, _pad(numbers))


def _pad(numbers: list[int]) -> Version:
    major, minor, patch = [*numbers, 0, 0][:3]
    return Version(major, minor, patch)


def _count_fixed(operator: str, numbers: list[int]) -> int:
    """Return how many leading numbers are fixed; the upper bound increments the last of them."""
    if operator == "~":
        return min(2, len(numbers))
    if operator == "=":
        return len(numbers)
    nonzero = next((i for i, n in enumerate(numbers) if n), len(numbers) - 1)
    return nonzero + 1


def _parse_partial(text: str, whole: str) -> list[int]:
    match = _PARTIAL.fullmatch(text)
    if match is None:
        raise _build_constraint_error(whole)
    return [int(group) for group in match.groups() if group is not None]


def _compare(version: Version, operator: str, bound: Version) -> bool:
    match operator:
        case ">=":
            return version >= bound
        case "<=":
            return version <= bound
        case ">":
            return version > bound
        case "<":
            return version < bound
        case _:
            return version == bound


def _build_constraint_error(text: str) -> UsageError:
    return UsageError(
        f"{text[:80]!r} is not a version constraint", hint="use 1.2.0, ^1.2, ~1.2, >=1,<2 or *"
    )


NamespaceAuthority = tuple[str, str]
"""A host and one namespace of it."""


def find_namespace_registries(
    namespace: str, *, assigned: Iterable[NamespaceAuthority], pinned: Iterable[NamespaceAuthority]
) -> tuple[str, ...]:
    """Return the registry assigned to a namespace, else all that its keys were pinned from."""
    named = sorted({host for host, name in assigned if name == namespace})
    return tuple(named or sorted({host for host, name in pinned if name == namespace}))


def find_other_registry(registry: str, *, registries: Collection[str]) -> str | None:
    """Return the only registry that a namespace belongs to, if it is not this one; else None.

    A file belongs to no registry, so it is never in conflict with one.
    """
    other = len(registries) == 1 and registry not in {*registries, FROM_FILE}
    return next(iter(registries)) if other else None


def find_authorities(
    registry: str | None, *, registries: Collection[str], known: Collection[str]
) -> frozenset[str]:
    """Return the registries whose grants and revocations apply to packages from ``registry``.

    For a known registry only its own apply. For a file, those of the registry that the namespace
    belongs to; for a mirror without a trusted index, its own and those. A namespace that does not
    belong to exactly one registry adds none.
    """
    own = frozenset() if registry is None or registry == FROM_FILE else frozenset({registry})
    if registry in known or len(registries) != 1:
        return own
    return own | frozenset(registries)
