"""What the user calls the keys of ``trust.json``: for display only, nothing is decided here.

`expertctl.trust` reads that file strictly, with a cryptography library that `list` must not need.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertctl.store.ref import StoredExpert
from expertctl.trust.homes import Belonging, authorities, homes, other_home


@dataclass(frozen=True, slots=True)
class Signers:
    """Names by key id, what is revoked where, and which registry a namespace belongs to."""

    names: dict[str, str] = field(default_factory=dict)
    revoked: frozenset[tuple[str, str | None, str | None]] = frozenset()
    """Key id, registry and namespace; a key without the last two is revoked everywhere."""
    meant: frozenset[Belonging] = frozenset()
    pinned: frozenset[Belonging] = frozenset()
    registries: frozenset[str] = frozenset()
    """The known ones."""

    def shown(self, key_id: str | None) -> str:
        """Return what to call a signer: a name, the start of an id, or a dash."""
        if key_id is None:
            return "-"
        return self.names.get(key_id, key_id.removeprefix("sha256:")[:12])

    def has_revoked(self, expert: StoredExpert) -> bool:
        """Tell whether the key of an expert was revoked, everywhere or where it came from."""
        if expert.signer is None:
            return False
        namespace = expert.package.namespace
        belongs_to = self._homes(expert)
        hosts = authorities(expert.registry, homes=belongs_to, known=self.registries)
        scopes = [(None, None), *((host, namespace) for host in hosts)]
        return any((expert.signer, *scope) in self.revoked for scope in scopes)

    def other_home(self, expert: StoredExpert) -> str | None:
        """Return the registry that an expert's namespace belongs to, if it is from another one."""
        return other_home(expert.registry, homes=self._homes(expert))

    def _homes(self, expert: StoredExpert) -> tuple[str, ...]:
        return homes(expert.package.namespace, meant=self.meant, pinned=self.pinned)


def read_signers(path: Path) -> Signers:
    """Read the names; a file that is missing or damaged has none (`doctor` reports it)."""
    try:
        return _signers(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Signers()


def _signers(document: Any) -> Signers:
    keys, registries = document["keys"], document.get("registries", [])
    granted = {
        (grant["registry"], grant["namespace"])
        for key in keys
        for grant in key["grants"]
        if grant.get("registry")
    }
    return Signers(
        names={str(key["key_id"]): str(key["name"]) for key in keys},
        revoked=frozenset(
            (entry["key_id"], entry.get("registry"), entry.get("namespace"))
            for entry in document["revoked"]
        ),
        registries=frozenset(r["host"] for r in registries),
        meant=frozenset((r["host"], name) for r in registries for name in r["namespaces"]),
        pinned=frozenset(granted | {(r["host"], name) for r in registries for name in r["pinned"]}),
    )
