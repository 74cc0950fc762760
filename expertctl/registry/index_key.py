"""Accepting a registry: its index key, held against what the person was told of it.

The fingerprint comes from whoever runs the registry (``registry init`` prints it); what the
registry itself sends proves nothing but that it has a key of that fingerprint.
"""

from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import DigestError, NotFoundError, RegistryError, TrustError, UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.api_client import ApiClient
from expertctl.registry.http import Http
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PublicKey
from expertctl.trust.record import TrustRecord


@dataclass(frozen=True, slots=True)
class Accepted:
    """What accepting a registry changes."""

    known: KnownRegistry
    replaced: str | None
    """The id of the index key that was accepted before, where it was another."""
    moved: tuple[tuple[str, str], ...]
    """Namespaces that belonged to another registry, with its host."""


def accept(known: KnownRegistry, record: TrustRecord) -> Accepted:
    """Tell what accepting a registry changes; nothing is written here."""
    before = record.registry(known.host)
    other_key = before is not None and before.index_key != known.index_key
    moved = tuple(
        (name, host)
        for name in known.namespaces
        for host in record.homes(name)
        if host != known.host
    )
    return Accepted(known, before.index_key.key_id if before and other_key else None, moved)


def read_fingerprint(text: str) -> str:
    """Return a fingerprint that a person typed: the id of a key.

    Raises:
        UsageError: when it is not ``sha256:`` and 64 hex digits.
    """
    try:
        return str(Digest.parse(text.strip().lower()))
    except DigestError as error:
        hint = "`expertctl registry init` prints it; ask whoever runs the registry"
        raise UsageError(f"{text[:80]!r} is not a fingerprint such as sha256:…", hint=hint) from (
            error
        )


def fetch_index_key(http: Http, address: RegistryAddress, *, fingerprint: str) -> PublicKey:
    """Return the index key of a registry, which must be the one with this fingerprint.

    Raises:
        TrustError: when the registry has another.
        RegistryError: when it cannot be reached or is no registry of ours.
    """
    key = PublicKey.from_pem(_sent(http, address), what=f"the index key of {address.host}")
    if key.key_id != fingerprint:
        raise TrustError(
            f"{address.host} has the index key {key.key_id}, not {fingerprint}",
            hint="nothing was accepted; ask whoever runs the registry which one is right",
        )
    return key


def _sent(http: Http, address: RegistryAddress) -> bytes:
    foreign = RegistryError(
        f"{address.host} says nothing of an index key",
        hint="an OCI registry of another kind has no index: packages from there need a digest",
    )
    try:
        index_key = ApiClient(http, address).get("").get("index_key")
    except NotFoundError as error:
        raise foreign from error
    pem = index_key.get("public_key") if isinstance(index_key, dict) else None
    if not isinstance(pem, str):
        raise foreign
    return pem.encode()
