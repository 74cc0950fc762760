"""Asking a registry for the index document of a package: signed, and never older than before."""

import hashlib

from expertctl.errors import NotFoundError, RegistryError
from expertctl.reference import PackageName
from expertctl.registry.http import Call, Http
from expertctl.registry.index_document import IndexDocument
from expertctl.registry.index_envelope import MAX_ENVELOPE
from expertctl.registry.index_store import IndexStore, Remembered
from expertctl.registry.known import address_of
from expertctl.trust.grant import KnownRegistry

_SAME = 304


def fetch_index(
    client: Http,
    known: KnownRegistry,
    package: PackageName,
    store: IndexStore,
    *,
    offline: bool = False,
    attempts: int | None = None,
) -> IndexDocument:
    """Return what a registry says of a package now; offline, what it said last.

    ``attempts`` is how often it is tried, where not as often as usual.

    Raises:
        NotFoundError: when it has no such package, or we are offline and never asked it.
        TrustError: when its index key did not sign this, or it is older than before.
        StoreError: when what it said last cannot be read, or the answer not be remembered.
        RegistryError: when it cannot be reached or understood.
    """
    floor = store.recall(known, package)
    if offline:
        return _recalled(floor, known, package)
    envelope = _asked(client, known, package, floor, attempts)
    return store.believe(known, package, envelope, floor=floor)


def index_target(package: PackageName) -> str:
    """Return where a registry keeps the index document of a package."""
    return f"/tuf/targets/index/{package.namespace}/{package.name}.json"


def _recalled(
    floor: Remembered | None, known: KnownRegistry, package: PackageName
) -> IndexDocument:
    if floor is None:
        raise NotFoundError(
            f"{known.host} was never asked about {package}, and may not be now",
            hint="leave out --offline",
        )
    return floor.document


def _asked(
    client: Http,
    known: KnownRegistry,
    package: PackageName,
    floor: Remembered | None,
    attempts: int | None,
) -> bytes:
    """Return the envelope; a registry that has nothing newer sends nothing."""
    headers = {"Accept": "application/json"}
    if floor is not None:
        headers["If-None-Match"] = _etag(floor.envelope)
    call = Call("GET", address_of(known), index_target(package), headers=headers)
    try:
        answer = client.request(
            call, max_bytes=MAX_ENVELOPE, accept={200, _SAME}, attempts=attempts
        )
    except NotFoundError as error:
        hint = (
            f"`expertctl search {package.name}` shows what you may see; "
            f"if {package.namespace}/* is private, `expertctl login {known.host}` first"
        )
        message = f"{known.host} has no package {package} that you may read"
        raise NotFoundError(message, hint=hint) from error
    if answer.status != _SAME:
        return answer.body
    if floor is None:
        raise RegistryError(f"{known.host}: 304 for {package}, of which nothing is here")
    return floor.envelope


def _etag(envelope: bytes) -> str:
    return f'"sha256:{hashlib.sha256(envelope).hexdigest()}"'
