"""Trust in registries: which one a reference means, its index key, and the publisher keys it names.

A namespace belongs to one registry: packages of one name from two of them are never merged, and the
registry of a namespace changes only when the user says so. A package or a project file cannot
change it.

The index key of a registry is accepted by its fingerprint, which comes from whoever runs the
registry (``registry init`` prints it); what the registry itself sends proves only that it has a key
of that fingerprint.

Publisher keys are trusted on first use: at the first install of a namespace from a registry the
keys in its index are pinned, once the signatures of everything to install were verified with them
(`pin_verified_keys`). From then on a new key is accepted when an accepted key vouches for it
(`verify_key_statement`), or when the user adds it. Revocations apply at once. All of it is limited
to that namespace of that registry.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from expertctl.digest import Digest
from expertctl.errors import (
    DigestError,
    NotFoundError,
    RegistryError,
    RevokedError,
    TrustError,
    UsageError,
    to_single_line,
)
from expertctl.reference import FROM_FILE, PackageName, Reference
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient
from expertctl.registry.http import RegistryHttp
from expertctl.registry.index_document import IndexDocument, KeyEntry, Release, SignedForm
from expertctl.trust.dsse import read_claimed_signer, verify_key_statement
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PublicKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore


def choose_registry(
    reference: Reference, record: TrustRecord, default: str | None, *, allow_http: bool = False
) -> RegistryAddress:
    """Return the registry that a user's reference means.

    The host that it names; else the registry that the user assigned to the namespace; else the one
    from which the namespace's keys were pinned; else ``default``, the setting.

    Raises:
        TrustError: when the namespace belongs to several registries.
        UsageError: when there is nothing to choose, or a host is not one.
    """
    if reference.registry is not None:
        return _parse_address(reference.registry, record, allow_http=allow_http)
    if home := _find_authority(reference, record):
        return _parse_address(home, record, allow_http=allow_http)
    if default is not None:
        return _parse_address(default, record, allow_http=allow_http)
    raise UsageError(
        f"{reference}: no registry is set",
        hint="`expertctl config set registry HOST`, or write HOST/namespace/name",
    )


def choose_required_registry(
    reference: Reference, record: TrustRecord, default: str | None, *, allow_http: bool = False
) -> RegistryAddress:
    """Return the registry that a reference in a package or a project file means.

    Such a reference moves no namespace: a host in it must be where the namespace belongs already,
    or, where it belongs nowhere yet, a registry that the user knows.

    Raises:
        TrustError: when the reference names another registry, or one that is not known.
        UsageError: when there is nothing to choose, or a host is not one.
    """
    if reference.registry is None:
        return choose_registry(reference, record, default, allow_http=allow_http)
    named = _parse_address(reference.registry, record, allow_http=allow_http)
    check_authority(
        reference,
        named,
        record,
        hint=f"if that is right: `expertctl trust registry add {named.url} --namespace "
        f"{reference.package.namespace}` with its fingerprint",
    )
    find_known_registry(named, record)
    return named


def check_authority(
    reference: Reference, named: RegistryAddress, record: TrustRecord, *, hint: str
) -> None:
    """Require that a namespace belongs to the named registry, or to none yet.

    Raises:
        TrustError: when it belongs elsewhere.
    """
    homes = record.list_registries_for(reference.package.namespace)
    if homes and named.host not in homes:
        raise TrustError(
            f"{reference} would take the namespace {reference.package.namespace} from "
            f"{named.host}, but it belongs to {' and '.join(homes)}",
            hint=hint,
        )


def find_known_registry(address: RegistryAddress, record: TrustRecord) -> KnownRegistry:
    """Return a registry whose index key was accepted.

    Raises:
        TrustError: when that key was not accepted.
    """
    if known := record.find_registry(address.host):
        return known
    raise TrustError(
        f"the index key of {address.host} is not known, so its index cannot be trusted",
        hint=f"ask whoever runs it, then `expertctl trust registry add {address.url} "
        "--fingerprint sha256:…`",
    )


def known_registry_address(known: KnownRegistry) -> RegistryAddress:
    """Return the address of a known registry; its URL was accepted with its key."""
    return RegistryAddress.parse(known.url, allow_http=True)


def _find_authority(reference: Reference, record: TrustRecord) -> str | None:
    homes = record.list_registries_for(reference.package.namespace)
    if len(homes) > 1:
        raise TrustError(
            f"{reference}: {reference.package.namespace} was installed from {' and '.join(homes)}",
            hint=f"name it in full: {homes[0]}/{reference}",
        )
    return homes[0] if homes else None


def _parse_address(text: str, record: TrustRecord, *, allow_http: bool) -> RegistryAddress:
    """Parse a host; for a known registry return its accepted URL, whatever the scheme."""
    if text == FROM_FILE:
        raise UsageError(f"{FROM_FILE!r} stands for what came from files, not for a registry")
    for known in record.registries:
        if known.host == text.lower():
            return known_registry_address(known)
    return RegistryAddress.parse(text, allow_http=allow_http)


@dataclass(frozen=True, slots=True)
class RegistryAcceptance:
    """The changes of accepting a registry."""

    known: KnownRegistry
    replaced: str | None
    """The id of the previous index key, where it was another."""
    moved: tuple[tuple[str, str], ...]
    """Namespaces that belonged to another registry, with its host."""


def plan_acceptance(known: KnownRegistry, record: TrustRecord) -> RegistryAcceptance:
    """Return the changes of accepting a registry; nothing is written."""
    before = record.find_registry(known.host)
    other_key = before is not None and before.index_key != known.index_key
    moved = tuple(
        (name, host)
        for name in known.namespaces
        for host in record.list_registries_for(name)
        if host != known.host
    )
    return RegistryAcceptance(
        known, before.index_key.key_id if before and other_key else None, moved
    )


def parse_fingerprint(text: str) -> str:
    """Parse a fingerprint that a user typed: the id of a key.

    Raises:
        UsageError: when it is not ``sha256:`` and 64 hex digits.
    """
    try:
        return str(Digest.parse(text.strip().lower()))
    except DigestError as error:
        hint = "`expertctl registry init` prints it; ask whoever runs the registry"
        message = f"{text[:80]!r} is not a fingerprint such as sha256:…"
        raise UsageError(message, hint=hint) from error


def fetch_index_key(http: RegistryHttp, address: RegistryAddress, *, fingerprint: str) -> PublicKey:
    """Fetch the index key of a registry, which must have this fingerprint.

    Raises:
        TrustError: when the registry has another.
        RegistryError: when it cannot be reached or is no registry of ours.
    """
    key = PublicKey.from_pem(
        _fetch_key_bytes(http, address), what=f"the index key of {address.host}"
    )
    if key.key_id != fingerprint:
        raise TrustError(
            f"{address.host} has the index key {key.key_id}, not {fingerprint}",
            hint="nothing was accepted; ask whoever runs the registry which one is right",
        )
    return key


def _fetch_key_bytes(http: RegistryHttp, address: RegistryAddress) -> bytes:
    foreign = RegistryError(
        f"{address.host} has no index key",
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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PinnedKey:
    """A publisher key that is now trusted for a namespace of a registry."""

    key_id: str
    namespace: str
    registry: str
    vouched: bool
    """Whether an accepted key vouches for it; else it was pinned on first use."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        if self.vouched:
            reason = "a key that you trust already vouches for it"
        else:
            reason = "first install of the namespace; compare it with what the publisher says"
        return f"pinned for {self.namespace}/* of {self.registry}: key {self.key_id} ({reason})"


def pin_verified_keys(
    indexes: Sequence[tuple[IndexDocument, KnownRegistry]],
    trust: TrustStore,
    verify: Callable[[TrustRecord], T],
) -> tuple[T, list[PinnedKey]]:
    """Verify with the keys that indexes name, then pin these keys; nothing is pinned if it raises.

    Both happen while no other process changes ``trust.json``, so the keys written are those that
    were verified against. Returns the result of ``verify`` and the newly pinned keys.

    Raises:
        TrustError: when ``trust.json`` cannot be trusted or would grow too large.
        StoreError: when it cannot be written.
        ExpertError: as ``verify``.
    """
    record = trust.read()
    if _pin_all(record, indexes) == record:
        return verify(record), []
    results: list[tuple[TrustRecord, T]] = []

    def change(before: TrustRecord) -> TrustRecord:
        after = _pin_all(before, indexes)
        results.append((before, verify(after)))
        return after

    after = trust.update(change)
    [(before, result)] = results
    return result, _list_new_pins(before, after, indexes)


def _pin_all(
    record: TrustRecord, indexes: Iterable[tuple[IndexDocument, KnownRegistry]]
) -> TrustRecord:
    for document, known in indexes:
        record = pin_index_keys(record, document, known)
    return record


def _list_new_pins(
    before: TrustRecord, after: TrustRecord, indexes: Iterable[tuple[IndexDocument, KnownRegistry]]
) -> list[PinnedKey]:
    places = dict.fromkeys((known.host, document.package.namespace) for document, known in indexes)
    return [
        PinnedKey(key.key_id, namespace, host, vouched=before.is_pinned(host, namespace))
        for host, namespace in places
        for key in after.list_pinned_keys(host, namespace)
        if key not in before.list_pinned_keys(host, namespace)
    ]


def pin_index_keys(
    record: TrustRecord, document: IndexDocument, known: KnownRegistry
) -> TrustRecord:
    """Return the record with the revocations and then the keys of an accepted index."""
    namespace, host = document.package.namespace, known.host
    record = _with_index_revocations(record, document, known)
    entries = [e for e in document.keys if not _is_revoked(record, e.key, namespace, host)]
    if not record.is_pinned(host, namespace):
        keys = [entry.key for entry in entries]
    else:
        keys = _trace_vouched_keys(entries, record.list_vouching_keys(host, namespace), namespace)
    return record.with_pins(host, namespace, keys) if keys else record


def apply_revocations(
    document: IndexDocument, known: KnownRegistry, trust: TrustStore
) -> list[str]:
    """Apply the revocations of an index, and nothing else, where keys are pinned already.

    Returns a sentence for each new revocation. Done as soon as an index is accepted: a revocation
    can only deny, and installed packages from there must be refused from now on.

    Raises:
        TrustError: when ``trust.json`` cannot be trusted or would grow too large.
        StoreError: when it cannot be written.
    """
    before = trust.read()
    if not before.is_pinned(known.host, document.package.namespace):
        return []
    after = _with_index_revocations(before, document, known)
    if after == before:
        return []
    after = trust.update(lambda record: _with_index_revocations(record, document, known))
    return _describe_new_revocations(before, after)


def find_signer_problem(
    form: SignedForm, release: Release, *, package: PackageName, host: str, record: TrustRecord
) -> TrustError | None:
    """Return why the signer of a form may not sign it; None when it may."""
    try:
        record.authorise(
            form.signer, package=package, content_digest=release.content_digest, registry=host
        )
    except RevokedError as error:
        return error
    except TrustError as error:
        return TrustError(
            f"{package}@{release.version} from {host} is signed by {form.signer}, for which no key "
            f"that is trusted for {package.namespace} vouches",
            hint="ask its publisher; if the key is theirs: `expertctl trust add KEY.pem "
            f"--namespace {package.namespace} --registry {host}` ({error.message})",
        )
    return None


def _with_index_revocations(
    record: TrustRecord, document: IndexDocument, known: KnownRegistry
) -> TrustRecord:
    reasons = [(entry.key_id, to_single_line(entry.reason)) for entry in document.revoked]
    return record.with_registry_revocations(known.host, document.package.namespace, reasons)


def _trace_vouched_keys(
    entries: Sequence[KeyEntry], vouching: Sequence[PublicKey], namespace: str
) -> list[PublicKey]:
    """Return accepted keys, and those that statements, each read once, trace back to them."""
    waiting: dict[str, list[KeyEntry]] = {}
    for entry in entries:
        if entry.statement is not None and (signer := read_claimed_signer(entry.statement)):
            waiting.setdefault(signer, []).append(entry)
    ready = list(vouching)
    seen = {key.key_id for key in vouching}
    found = [entry.key for entry in entries if entry.key.key_id in seen]
    while ready:
        signer_key = ready.pop()
        for entry in waiting.pop(signer_key.key_id, []):
            if entry.key.key_id not in seen and _is_vouched_by(signer_key, entry, namespace):
                seen.add(entry.key.key_id)
                ready.append(entry.key)
                found.append(entry.key)
    return found


def _is_vouched_by(signer: PublicKey, entry: KeyEntry, namespace: str) -> bool:
    assert entry.statement is not None
    try:
        verify_key_statement(entry.statement, namespace=namespace, new=entry.key, keys=[signer])
    except TrustError:  # a bad statement counts as none
        return False
    return True


def _is_revoked(record: TrustRecord, key: PublicKey, namespace: str, host: str) -> bool:
    return record.find_revocation(key.key_id, namespace=namespace, registry=host) is not None


def _describe_new_revocations(before: TrustRecord, after: TrustRecord) -> list[str]:
    known_before = set(before.revoked)
    return [
        f"{r.key_id} was revoked for {r.namespace}/* of {r.registry}"
        + f": {r.reason}" * bool(r.reason)
        for r in after.revoked
        if r not in known_before
    ]
