"""The registry that a command talks to: the one that is named, or the one that is implied."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from expertctl.cli.output import note_once
from expertctl.errors import UsageError
from expertctl.reference import Reference
from expertctl.registry.address import RegistryAddress
from expertctl.registry.api_client import ApiClient
from expertctl.registry.credentials import CredentialStore
from expertctl.registry.http import open_http
from expertctl.registry.oci_client import OciClient
from expertctl.settings import Settings
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

RegistryOption = Annotated[
    str | None,
    typer.Option("--registry", metavar="HOST", help="Another registry than the one that is set."),
]


@dataclass(frozen=True, slots=True)
class Connection:
    """One registry and the clients that talk to it."""

    address: RegistryAddress
    api: ApiClient
    oci: OciClient
    logged_in: bool
    """Whether requests to the registry carry a token."""

    @property
    def host(self) -> str:
        """The host name of the registry."""
        return self.address.host


@contextmanager
def connected(
    settings: Settings, wanted: Reference | None, registry: str | None
) -> Iterator[Connection]:
    """Connect to the registry of ``--registry``, else of the reference, else of its namespace."""
    named = _named(wanted, registry)
    namespaces = {wanted.package.namespace} if wanted is not None else set()
    with connected_for(settings, namespaces, named) as connection:
        yield connection


@contextmanager
def connected_for(
    settings: Settings, namespaces: Collection[str], registry: str | None
) -> Iterator[Connection]:
    """Connect to the named registry, else that of the namespaces, else the set one."""
    address = _address(settings, namespaces, registry)
    login = CredentialStore(settings.home.credentials).for_address(address)
    with open_http(settings, tell=note_once()) as http:
        yield Connection(
            address,
            ApiClient(http, address),
            OciClient(http, address, settings.home.registries / "uploads"),
            login is not None,
        )


def is_any_meant(settings: Settings, wanted: Reference, registry: str | None) -> bool:
    """Tell whether there is a registry to ask for a package: a named one, its own, or the set one.

    Raises:
        UsageError: when two are named, or the namespace belongs to several.
    """
    record = TrustStore(settings.home.trust).read()
    meant = _named(wanted, registry) or _home(record, {wanted.package.namespace})
    return (meant or settings.registry) is not None


def _named(wanted: Reference | None, registry: str | None) -> str | None:
    host = wanted.registry if wanted is not None else None
    if registry is not None and host is not None and registry != host:
        raise UsageError(f"{wanted} and --registry {registry} name two registries")
    return registry or host


def _address(
    settings: Settings, namespaces: Collection[str], registry: str | None
) -> RegistryAddress:
    record = TrustStore(settings.home.trust).read()
    chosen = registry or _home(record, namespaces) or settings.registry
    if chosen is None:
        hint = "`expertctl config set registry HOST`, EXPERT_REGISTRY or --registry HOST"
        raise UsageError("no registry is set", hint=hint)
    address = RegistryAddress.parse(chosen, allow_http=True)
    known = record.registry(address.host)
    return RegistryAddress.parse(
        known.url if known is not None else chosen, allow_http=settings.allow_http
    )


def _home(record: TrustRecord, namespaces: Collection[str]) -> str | None:
    """Return the registry that namespaces belong to, if they belong to one."""
    homes = {host for namespace in namespaces for host in record.homes(namespace)}
    if len(homes) > 1:
        names = ", ".join(sorted(homes))
        message = f"{', '.join(sorted(namespaces))}: known from {names}"
        raise UsageError(message, hint="say which with --registry HOST")
    return homes.pop() if homes else None
