"""Which registry a package is meant to come from, and whether its index key was accepted.

A namespace belongs to one registry: packages of one name from two of them are never merged, and the
registry of a namespace changes only when the person says so. What a package or a project file says
may ask for nothing else.
"""

from expertctl.errors import TrustError, UsageError
from expertctl.reference import FROM_FILE, Reference
from expertctl.registry.address import RegistryAddress
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.record import TrustRecord


def choose_registry(
    reference: Reference, record: TrustRecord, default: str | None, *, allow_http: bool = False
) -> RegistryAddress:
    """Return the registry that a person's reference means.

    The host that it names; else the registry that the person named for the namespace; else the one
    from which the namespace's keys were pinned; else ``default``, the setting.

    Raises:
        TrustError: when the namespace belongs to several registries.
        UsageError: when there is nothing to choose, or a host is not one.
    """
    if reference.registry is not None:
        return _address(reference.registry, record, allow_http=allow_http)
    if home := _home(reference, record):
        return _address(home, record, allow_http=allow_http)
    if default is not None:
        return _address(default, record, allow_http=allow_http)
    raise UsageError(
        f"{reference}: no registry is set",
        hint="`expertctl config set registry HOST`, or write HOST/namespace/name",
    )


def required_registry(
    reference: Reference, record: TrustRecord, default: str | None, *, allow_http: bool = False
) -> RegistryAddress:
    """Return the registry that a reference in a package or a project file means.

    Such a reference moves no namespace: a host in it must be where the namespace belongs already,
    or, where it belongs nowhere yet, a registry that the person knows.

    Raises:
        TrustError: when the reference names another registry, or one that is not known.
        UsageError: when there is nothing to choose, or a host is not one.
    """
    if reference.registry is None:
        return choose_registry(reference, record, default, allow_http=allow_http)
    named = _address(reference.registry, record, allow_http=allow_http)
    demand_home(
        reference,
        named,
        record,
        hint=f"if that is right: `expertctl trust registry add {named.url} --namespace "
        f"{reference.package.namespace}` with its fingerprint",
    )
    known_registry(named, record)
    return named


def demand_home(
    reference: Reference, named: RegistryAddress, record: TrustRecord, *, hint: str
) -> None:
    """Demand that a namespace belongs to the named registry, or to none yet.

    Raises:
        TrustError: when it belongs elsewhere.
    """
    homes = record.homes(reference.package.namespace)
    if homes and named.host not in homes:
        raise TrustError(
            f"{reference} would take the namespace {reference.package.namespace} from "
            f"{named.host}, but it belongs to {' and '.join(homes)}",
            hint=hint,
        )


def known_registry(address: RegistryAddress, record: TrustRecord) -> KnownRegistry:
    """Return a registry whose index key was accepted.

    Raises:
        TrustError: when that key was not accepted.
    """
    if known := record.registry(address.host):
        return known
    raise TrustError(
        f"the index key of {address.host} is not known, so nothing that it says can be believed",
        hint=f"ask whoever runs it, then `expertctl trust registry add {address.url} "
        "--fingerprint sha256:…`",
    )


def address_of(known: KnownRegistry) -> RegistryAddress:
    """Return where a known registry is; its URL was accepted with its key."""
    return RegistryAddress.parse(known.url, allow_http=True)


def _home(reference: Reference, record: TrustRecord) -> str | None:
    homes = record.homes(reference.package.namespace)
    if len(homes) > 1:
        raise TrustError(
            f"{reference}: {reference.package.namespace} was installed from {' and '.join(homes)}",
            hint=f"name it in full: {homes[0]}/{reference}",
        )
    return homes[0] if homes else None


def _address(text: str, record: TrustRecord, *, allow_http: bool) -> RegistryAddress:
    """Read a host; a known registry is where its accepted URL says, whatever the scheme."""
    if text == FROM_FILE:
        raise UsageError(f"{FROM_FILE!r} stands for what came from files, not for a registry")
    for known in record.registries:
        if known.host == text.lower():
            return address_of(known)
    return RegistryAddress.parse(text, allow_http=allow_http)
