"""`VersionPreference`: which installed version a reference means where it leaves that open.

One rule for the router, ``--expert``, `serve`, `list`, `why` and `export`, in `make_precedence`:

1. the version that the project's lock file names, or that the list names exactly;
2. one from the registry that the namespace belongs to;
3. one whose signing key was not revoked;
4. one that was not yanked, according to the last index of its registry;
5. the newest. A prerelease counts only where it is named.

So a yanked version is used only where it is locked or named exactly, or nothing else can be used.

This module reads three files for that, and for display, without a cryptography library, so that
`list` starts fast; a missing or damaged file says nothing:

- ``yanked.json``: installed versions that were yanked, repeated from the signed indexes. Every
  command that reads an index writes it again.
- ``trust.json``: names and revocations of keys; `expertctl.trust` reads it strictly.
- ``flagged.json``: the flags of packages that look made to mislead the router, repeated from
  `expertctl.store.suspicions`. It lists only contents that have flags.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertctl.errors import DigestError
from expertctl.files import write_atomic
from expertctl.reference import (
    ANY,
    Digest,
    NamespaceAuthority,
    PackageName,
    Reference,
    Version,
    find_authorities,
    find_namespace_registries,
    find_other_registry,
)
from expertctl.settings import Home
from expertctl.store.pins import PinFiles, VersionPin, VersionPins, allows_expert
from expertctl.store.refs import StoredExpert

YANKS_FILE_MODE = 0o600
MAX_YANKS_BYTES = 16 << 20

Yanks = Mapping[tuple[str, str], str]
"""Registry and ``namespace/name@version`` → the reason of the yank, which may be empty."""
StatedYanks = Mapping[tuple[str, PackageName], Mapping[Version, str]]
"""What registries say now: host and package → its yanked versions, with the reasons."""


def read_yanks(path: Path) -> dict[tuple[str, str], str]:
    """Read the yanked versions; a file that is missing or damaged has none."""
    try:
        with path.open("rb") as stream:
            document = json.loads(stream.read(MAX_YANKS_BYTES))
        return {
            (host, ref): reason
            for host, refs in document.items()
            for ref, reason in refs.items()
            if isinstance(reason, str)
        }
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}


def record_yanks(
    path: Path,
    stated: StatedYanks,
    *,
    installed: Callable[[], Iterable[StoredExpert]],
    locked: Callable[[], AbstractContextManager[object]],
) -> None:
    """Store what registries say about installed versions; packages not in ``stated`` stay.

    ``locked`` keeps other processes from writing; it is used only where something changes.

    Raises:
        StoreError: when the lock cannot be taken.
        OSError: when the file cannot be written.
    """
    experts = list(installed())
    if _update_yanks(read_yanks(path), stated, experts) == read_yanks(path):
        return
    with locked():
        after = _update_yanks(read_yanks(path), stated, list(installed()))
        write_atomic(path, _encode_yanks(after), mode=YANKS_FILE_MODE)


def _update_yanks(before: Yanks, stated: StatedYanks, installed: Iterable[StoredExpert]) -> Yanks:
    after = {}
    for expert in installed:
        key = expert.registry, expert.ref
        said = stated.get((expert.registry, expert.package))
        reason = before.get(key) if said is None else said.get(expert.version)
        if reason is not None:
            after[key] = reason
    return after


def _encode_yanks(yanks: Yanks) -> bytes:
    document: dict[str, dict[str, str]] = {}
    for (host, ref), reason in sorted(yanks.items()):
        document.setdefault(host, {})[ref] = reason
    return json.dumps(document, indent=1).encode()


@dataclass(frozen=True, slots=True)
class SignerNames:
    """Names of keys, revocations, and the registries that namespaces belong to."""

    names: dict[str, str] = field(default_factory=dict)
    revoked: frozenset[tuple[str, str | None, str | None]] = frozenset()
    """Key id, registry and namespace; a key without the last two is revoked everywhere."""
    assigned: frozenset[NamespaceAuthority] = frozenset()
    pinned: frozenset[NamespaceAuthority] = frozenset()
    registries: frozenset[str] = frozenset()
    """The hosts of the known registries."""

    def display_name(self, key_id: str | None) -> str:
        """Return the name of a signer: the user's name for it, the start of its id, or a dash."""
        if key_id is None:
            return "-"
        return self.names.get(key_id, key_id.removeprefix("sha256:")[:12])

    def has_revoked(self, expert: StoredExpert) -> bool:
        """Tell whether an expert's key was revoked, everywhere or where the expert came from."""
        if expert.signer is None:
            return False
        namespace = expert.package.namespace
        belongs_to = self._find_authorities(expert)
        hosts = find_authorities(expert.registry, registries=belongs_to, known=self.registries)
        scopes = [(None, None), *((host, namespace) for host in hosts)]
        return any((expert.signer, *scope) in self.revoked for scope in scopes)

    def find_other_authority(self, expert: StoredExpert) -> str | None:
        """Return the registry that an expert's namespace belongs to, if it is from another one."""
        return find_other_registry(expert.registry, registries=self._find_authorities(expert))

    def _find_authorities(self, expert: StoredExpert) -> tuple[str, ...]:
        return find_namespace_registries(
            expert.package.namespace, assigned=self.assigned, pinned=self.pinned
        )


def read_signers(path: Path) -> SignerNames:
    """Read the names; a file that is missing or damaged has none (`doctor` reports it)."""
    try:
        return _parse_signers(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return SignerNames()


def _parse_signers(document: Any) -> SignerNames:
    keys, registries = document["keys"], document.get("registries", [])
    granted = {
        (grant["registry"], grant["namespace"])
        for key in keys
        for grant in key["grants"]
        if grant.get("registry")
    }
    return SignerNames(
        names={str(key["key_id"]): str(key["name"]) for key in keys},
        revoked=frozenset(
            (entry["key_id"], entry.get("registry"), entry.get("namespace"))
            for entry in document["revoked"]
        ),
        registries=frozenset(r["host"] for r in registries),
        assigned=frozenset((r["host"], name) for r in registries for name in r["namespaces"]),
        pinned=frozenset(granted | {(r["host"], name) for r in registries for name in r["pinned"]}),
    )


FLAGS_FILE = "flagged.json"
SUSPICION_SENTENCE = "looks as if it were made to mislead the router"
"""The phrase of messages about a package that has a flag."""
CATCH_ALL = "grab-all"
"""The code for a package whose examples cover everything."""
FLAGS_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Flag:
    """One sign that a package was made to mislead the router."""

    code: str
    """``copied``, ``stuffed`` and so on: for programs."""
    sentence: str
    """For people; names what was found."""
    other: str | None = None
    """The other package that the flag is about, if any."""


FlagsByDigest = Mapping[Digest, tuple[Flag, ...]]
"""Content digest → its flags; contents without any are left out."""


def read_flags(path: Path) -> dict[Digest, tuple[Flag, ...]]:
    """Read all flags; a missing or damaged file has none (`doctor` checks the database)."""
    try:
        document = json.loads(path.read_bytes())
        return {Digest.parse(digest): decode_flags(flags) for digest, flags in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, DigestError):
        return {}


def write_flags(path: Path, flagged: FlagsByDigest) -> None:
    """Replace the file."""
    document = {str(digest): encode_flags(flags) for digest, flags in sorted(flagged.items())}
    write_atomic(path, json.dumps(document).encode(), mode=FLAGS_FILE_MODE)


def describe_flags(flags: Iterable[Flag]) -> str:
    """Return one line that says why a package is suspicious, each reason once."""
    return f"{SUSPICION_SENTENCE}: {'; '.join(dict.fromkeys(flag.sentence for flag in flags))}"


def encode_flags(flags: Iterable[Flag]) -> list[list[str | None]]:
    """Return flags as they are stored."""
    return [[flag.code, flag.sentence, flag.other] for flag in flags]


def decode_flags(stored: list[list[str]]) -> tuple[Flag, ...]:
    """Return stored flags."""
    return tuple(Flag(code, sentence, other) for code, sentence, other in stored)


def flags_to_json(flags: Iterable[Flag]) -> list[Mapping[str, str | None]]:
    """Return flags as ``--json`` shows them."""
    return [{"code": f.code, "sentence": f.sentence, "other": f.other} for f in flags]


Precedence = tuple[bool, bool, bool, bool, Version]
"""Sort key of one version among those of its package: the largest is meant."""


def make_precedence(
    version: Version, *, pinned: bool, at_home: bool, revoked: bool, yanked: bool
) -> Precedence:
    """Return the sort key of a version; see the rule above."""
    return pinned, at_home, not revoked, not yanked, version


@dataclass(frozen=True, slots=True)
class VersionPreference:
    """What decides between installed versions; without any of it the newest one is meant."""

    yanks: Yanks = field(default_factory=dict)
    pins: VersionPins = field(default_factory=VersionPins)
    signers: SignerNames = field(default_factory=SignerNames)

    def find_yank_reason(self, expert: StoredExpert) -> str | None:
        """Return why an expert was yanked, which may be empty; None when it was not."""
        return self.yanks.get((expert.registry, expert.ref))

    def find_pin(self, expert: StoredExpert) -> VersionPin | None:
        """Return the pin that names exactly this version; None when there is none."""
        found = self.pins.versions.get(expert.package)
        return found if found is not None and found.matches(expert) else None

    def precedence(self, expert: StoredExpert) -> Precedence:
        """Return the sort key of an installed version."""
        return make_precedence(
            expert.version,
            pinned=self.find_pin(expert) is not None,
            at_home=self.signers.find_other_authority(expert) is None,
            revoked=self.signers.has_revoked(expert),
            yanked=self.find_yank_reason(expert) is not None,
        )

    def may_mean(self, expert: StoredExpert, wanted: Reference) -> bool:
        """Tell whether a reference may mean an expert; a pinned prerelease is named by its pin."""
        open_ = wanted == Reference(expert.package, ANY, wanted.registry)
        named = open_ and wanted.registry in {None, expert.registry}
        return allows_expert(expert, wanted) or (named and self.find_pin(expert) is not None)

    def select_used(self, experts: Iterable[StoredExpert]) -> dict[PackageName, StoredExpert]:
        """Return the version of each package that is used where none is named."""
        found: dict[PackageName, StoredExpert] = {}
        for expert in sorted(experts, key=self.precedence):
            if self.may_mean(expert, Reference(expert.package)):
                found[expert.package] = expert
        return found


@dataclass(frozen=True, slots=True)
class VersionUsage:
    """Whether an installed version is used where none is named, and what decides that."""

    used: bool
    used_instead: str | None
    """The version that is used in place of this one; None where this one or none is."""
    others: tuple[str, ...]
    """The other installed versions."""
    pinned: str | None
    """The lock file or list that names exactly this version."""
    yanked: str | None
    """Why it was yanked, which may be empty; None when it was not."""


def describe_version_usage(
    expert: StoredExpert, experts: Iterable[StoredExpert], preference: VersionPreference
) -> VersionUsage:
    """Compare an installed version with the others of its package."""
    same = [other for other in experts if other.package == expert.package]
    used = preference.select_used(same).get(expert.package)
    pin = preference.find_pin(expert)
    return VersionUsage(
        used=used == expert,
        used_instead=used.ref if used not in {None, expert} else None,
        others=tuple(other.ref for other in same if other != expert),
        pinned=str(pin.source) if pin else None,
        yanked=preference.find_yank_reason(expert),
    )


PREFER_NEWEST = VersionPreference()
"""The preference without any knowledge: the newest version."""


def read_preference(home: Home, folder: Path | None = None) -> VersionPreference:
    """Read the preference of a home and of the project in a folder."""
    return VersionPreference(
        read_yanks(home.yanked), PinFiles(home, folder).read(), read_signers(home.trust)
    )


def find_working_folder() -> Path | None:
    """Return the working folder; None when it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None
