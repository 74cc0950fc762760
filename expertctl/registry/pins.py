"""Publisher keys from an index: pinned at first, later only with a pinned key's word.

At the first install of a namespace from a registry its word is taken for the keys of the namespace,
once the signatures of all that is to be installed were verified with them (`pin_verified`).
From then on a new key counts when a key that counts already vouches for it (`key_statement`), or
when the person adds it. Revocations are taken over at once. All of it holds for that namespace of
that registry and for nothing else.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from expertctl.errors import RevokedError, TrustError
from expertctl.plain_text import one_line
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, KeyEntry, Release, SignedForm
from expertctl.registry.key_statement import claimed_signer, statement_signer
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PublicKey
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PinnedKey:
    """A publisher key that counts from now on for a namespace of a registry."""

    key_id: str
    namespace: str
    registry: str
    vouched: bool
    """Whether a key that counted already vouches for it; else the registry's word was taken."""

    @property
    def message(self) -> str:
        """The sentence for the user."""
        if self.vouched:
            reason = "a key that you trust already vouches for it"
        else:
            reason = "first install of the namespace; compare it with what the publisher says"
        return f"pinned for {self.namespace}/* of {self.registry}: key {self.key_id} ({reason})"


def pin_verified(
    indexes: Sequence[tuple[IndexDocument, KnownRegistry]],
    trust: TrustStore,
    verify: Callable[[TrustRecord], T],
) -> tuple[T, list[PinnedKey]]:
    """Verify with the keys that indexes name, then pin these keys; nothing is pinned if it raises.

    Both happen while no other process changes ``trust.json``, so what is written is what was
    verified against. Returns the result of ``verify`` and the keys that count from now on.

    Raises:
        TrustError: when ``trust.json`` may not be believed or would grow too large.
        StoreError: when it cannot be written.
        ExpertError: as ``verify``.
    """
    record = trust.read()
    if _all_pinned(record, indexes) == record:
        return verify(record), []
    results: list[tuple[TrustRecord, T]] = []

    def change(before: TrustRecord) -> TrustRecord:
        after = _all_pinned(before, indexes)
        results.append((before, verify(after)))
        return after

    after = trust.change(change)
    [(before, result)] = results
    return result, _new_pins(before, after, indexes)


def _all_pinned(
    record: TrustRecord, indexes: Iterable[tuple[IndexDocument, KnownRegistry]]
) -> TrustRecord:
    for document, known in indexes:
        record = pinned(record, document, known)
    return record


def _new_pins(
    before: TrustRecord,
    after: TrustRecord,
    indexes: Iterable[tuple[IndexDocument, KnownRegistry]],
) -> list[PinnedKey]:
    places = dict.fromkeys((known.host, document.package.namespace) for document, known in indexes)
    return [
        PinnedKey(key.key_id, namespace, host, vouched=before.is_pinned(host, namespace))
        for host, namespace in places
        for key in after.pinned_keys(host, namespace)
        if key not in before.pinned_keys(host, namespace)
    ]


def pinned(record: TrustRecord, document: IndexDocument, known: KnownRegistry) -> TrustRecord:
    """Return what is trusted after an index was believed; revocations come first."""
    namespace, host = document.package.namespace, known.host
    record = _revoking(record, document, known)
    entries = [e for e in document.keys if not _is_revoked(record, e.key, namespace, host)]
    if not record.is_pinned(host, namespace):
        keys = [entry.key for entry in entries]
    else:
        keys = _vouched_for(entries, record.vouching_keys(host, namespace), namespace)
    return record.with_pins(host, namespace, keys) if keys else record


def heed(document: IndexDocument, known: KnownRegistry, trust: TrustStore) -> list[str]:
    """Take over what an index revokes, and nothing else, where keys are pinned already.

    Returns a sentence for each new revocation. Done as soon as an index is believed: a revocation
    can only deny, and what is installed from there must be refused from now on.

    Raises:
        TrustError: when ``trust.json`` may not be believed or would grow too large.
        StoreError: when it cannot be written.
    """
    before = trust.read()
    if not before.is_pinned(known.host, document.package.namespace):
        return []
    after = _revoking(before, document, known)
    if after == before:
        return []
    after = trust.change(lambda record: _revoking(record, document, known))
    return _new_revocations(before, after)


def trusted_form(
    release: Release, *, package: PackageName, host: str, record: TrustRecord
) -> SignedForm:
    """Return the newest signed form of a version whose signer may sign it.

    Raises:
        RevokedError: when there is none, and the signer of the newest was revoked.
        TrustError: when there is none.
    """
    problems = []
    for form in reversed(release.forms):
        problem = signer_problem(form, release, package=package, host=host, record=record)
        if problem is None:
            return form
        problems.append(problem)
    raise problems[0]


def signer_problem(
    form: SignedForm, release: Release, *, package: PackageName, host: str, record: TrustRecord
) -> TrustError | None:
    """Return why the signer of a form may not sign it; ``None`` when it may."""
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


def _revoking(record: TrustRecord, document: IndexDocument, known: KnownRegistry) -> TrustRecord:
    reasons = [(entry.key_id, _line(entry.reason)) for entry in document.revoked]
    return record.with_registry_revocations(known.host, document.package.namespace, reasons)


def _vouched_for(
    entries: Sequence[KeyEntry], vouching: Sequence[PublicKey], namespace: str
) -> list[PublicKey]:
    """Return keys that count, and those that statements, each read once, trace back to them."""
    waiting: dict[str, list[KeyEntry]] = {}
    for entry in entries:
        if entry.statement is not None and (signer := claimed_signer(entry.statement)):
            waiting.setdefault(signer, []).append(entry)
    ready = list(vouching)
    seen = {key.key_id for key in vouching}
    found = [entry.key for entry in entries if entry.key.key_id in seen]
    while ready:
        signer_key = ready.pop()
        for entry in waiting.pop(signer_key.key_id, []):
            if entry.key.key_id not in seen and _vouches(signer_key, entry, namespace):
                seen.add(entry.key.key_id)
                ready.append(entry.key)
                found.append(entry.key)
    return found


def _vouches(signer: PublicKey, entry: KeyEntry, namespace: str) -> bool:
    assert entry.statement is not None
    try:
        statement_signer(entry.statement, namespace=namespace, new=entry.key, keys=[signer])
    except TrustError:  # a bad statement is worth as much as none
        return False
    return True


def _is_revoked(record: TrustRecord, key: PublicKey, namespace: str, host: str) -> bool:
    return record.revocation(key.key_id, namespace=namespace, registry=host) is not None


def _line(reason: str) -> str:
    """Return a reason as one line that can be printed."""
    return one_line(reason)


def _new_revocations(before: TrustRecord, after: TrustRecord) -> list[str]:
    known_before = set(before.revoked)
    return [
        f"{r.key_id} was revoked for {r.namespace}/* of {r.registry}"
        + f": {r.reason}" * bool(r.reason)
        for r in after.revoked
        if r not in known_before
    ]
