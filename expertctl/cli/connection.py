"""Connects to a registry; ``expertctl login``, ``logout`` and ``token``.

The registry is the one that is named, else that of the reference, else that of the namespace, else
the setting. Also suggests names for experts that are not found, from those installed and those of
the registry.
"""

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

import typer

from expertctl.cli.completion import complete_registries
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, make_note_once, note, print_message
from expertctl.errors import ExpertError, NotFoundError, UsageError, to_single_line
from expertctl.install.sources import RegistrySources
from expertctl.reference import PackageName, Reference
from expertctl.registry.accounts import (
    AccessToken,
    LoginResult,
    check_reachable,
    create_token,
    list_tokens,
    parse_lifetime,
    revoke_token,
    verify_login,
)
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient, OciClient, search_packages
from expertctl.registry.credentials import (
    DEFAULT_USER,
    MAX_SECRET,
    Credential,
    CredentialStore,
    read_environment_credential,
)
from expertctl.registry.http import open_http
from expertctl.settings import Settings, load_settings
from expertctl.store.store import Store, find_similar_names
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore

RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="HOST",
        autocompletion=complete_registries,
        help="Use this registry instead of the configured one.",
    ),
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
def connect(
    settings: Settings, wanted: Reference | None, registry: str | None
) -> Iterator[Connection]:
    """Connect to the registry of ``--registry``, else of the reference, else of its namespace."""
    named = _resolve_host(wanted, registry)
    namespaces = {wanted.package.namespace} if wanted is not None else set()
    with connect_for_namespaces(settings, namespaces, named) as connection:
        yield connection


@contextmanager
def connect_for_namespaces(
    settings: Settings, namespaces: Collection[str], registry: str | None
) -> Iterator[Connection]:
    """Connect to the named registry, else that of the namespaces, else that of the setting."""
    address = _resolve_address(settings, namespaces, registry)
    login = CredentialStore(settings.home.credentials).find_credential(address)
    with open_http(settings, notify=make_note_once()) as http:
        yield Connection(
            address,
            ApiClient(http, address),
            OciClient(http, address, settings.home.registries / "uploads"),
            login is not None,
        )


def has_registry(settings: Settings, wanted: Reference, registry: str | None) -> bool:
    """Return whether any registry can be queried for a package: named, its own, or set.

    Raises:
        UsageError: when two are named, or the namespace belongs to several.
    """
    record = TrustStore(settings.home.trust).read()
    meant = _resolve_host(wanted, registry) or _find_home_registry(
        record, {wanted.package.namespace}
    )
    return (meant or settings.registry) is not None


def _resolve_host(wanted: Reference | None, registry: str | None) -> str | None:
    host = wanted.registry if wanted is not None else None
    if registry is not None and host is not None and registry != host:
        raise UsageError(f"{wanted} and --registry {registry} name two registries")
    return registry or host


def _resolve_address(
    settings: Settings, namespaces: Collection[str], registry: str | None
) -> RegistryAddress:
    record = TrustStore(settings.home.trust).read()
    chosen = registry or _find_home_registry(record, namespaces) or settings.registry
    if chosen is None:
        hint = "`expertctl config set registry HOST`, EXPERT_REGISTRY or --registry HOST"
        raise UsageError("no registry is set", hint=hint)
    address = RegistryAddress.parse(chosen, allow_http=True)
    known = record.find_registry(address.host)
    return RegistryAddress.parse(
        known.url if known is not None else chosen, allow_http=settings.allow_http
    )


def _find_home_registry(record: TrustRecord, namespaces: Collection[str]) -> str | None:
    """Return the registry that the namespaces belong to, if there is one."""
    homes = {host for namespace in namespaces for host in record.list_registries_for(namespace)}
    if len(homes) > 1:
        names = ", ".join(sorted(homes))
        message = f"{', '.join(sorted(namespaces))}: known from {names}"
        raise UsageError(message, hint="choose one with --registry HOST")
    return homes.pop() if homes else None


_MAX_HITS = 100


def add_package_suggestions(
    error: NotFoundError, wanted: Iterable[Reference], sources: RegistrySources, store: Store
) -> NotFoundError:
    """Return an error about a reference that is not found, with the names that may be meant."""
    missing = next((each for each in wanted if error.message.startswith(f"{each} ")), None)
    if missing is None:
        return error
    names = {*_list_installed_names(store), *_search_registry_names(missing, sources)} - {
        str(missing.package)
    }
    near = find_similar_names(str(missing.package), sorted(names))
    if not near:
        return error
    meant = f"did you mean {' or '.join(near)}?"
    return NotFoundError(error.message, hint=meant)


def _list_installed_names(store: Store) -> Iterator[str]:
    with suppress(ExpertError, OSError):  # the error to report is another one
        yield from (str(expert.package) for expert in store.scan().experts)


def _search_registry_names(missing: Reference, sources: RegistrySources) -> Iterator[str]:
    """Yield the packages of the namespace, and those of other namespaces with that name."""
    if sources.settings.offline:
        return
    with suppress(ExpertError):
        api = ApiClient(sources.http, sources.resolve_address(missing, by_hand=True))
        for text in (missing.package.namespace, missing.package.name):
            found = (hit.name for hit in search_packages(api, text, limit=_MAX_HITS).results)
            yield from filter(is_package_name, found)


def is_package_name(text: str) -> bool:
    """Return whether a text of a registry is a package name, and so may be part of a hint."""
    try:
        return str(PackageName.parse(text)) == text
    except UsageError:
        return False


RegistryArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="HOST",
        autocompletion=complete_registries,
        help="The registry (default: the configured one).",
    ),
]


def login(
    registry: RegistryArgument = None,
    user: Annotated[
        str | None, typer.Option(help="The user name, if the registry requires one.")
    ] = None,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Read the token from stdin, for scripts.")
    ] = False,
    realm: Annotated[
        str | None, typer.Option(metavar="HOST", help="Another host that may receive the token.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a registry's token and save it. It is never taken from the arguments.

    Example: expertctl login registry.example.com
    """
    settings = load_settings()
    address = _resolve_login_address(settings, registry)
    found = None if token_stdin else read_environment_credential(address, os.environ)
    if found is None and not token_stdin and sys.stdin.isatty():
        check_reachable(
            settings, address, os.environ, notify=make_note_once()
        )  # before a person is asked
    secret = found.secret if found else _read_secret(address, from_stdin=token_stdin)
    name = user or (found.user if found else DEFAULT_USER)
    other = RegistryAddress.parse(realm, allow_http=settings.allow_http).url if realm else None
    credential = Credential(name, secret, other)
    done = verify_login(settings, address, credential, os.environ, notify=make_note_once())
    CredentialStore(settings.home.credentials).add(address, done.credential)
    if not done.checked:
        note(f"warning: {address.host} accepts anyone and did not check the token")
    emit(_build_login_document(done), _format_login(done), as_json=as_json)


def logout(registry: RegistryArgument = None, as_json: JsonFlag = False) -> None:
    """Delete the saved token of a registry. The token itself stays valid until it is revoked.

    Example: expertctl logout registry.example.com
    """
    settings = load_settings()
    address = _resolve_login_address(settings, registry)
    removed = CredentialStore(settings.home.credentials).remove(address)
    fact = "logged out of" if removed else "there was no login for"
    document = {"registry": address.host, "url": address.url, "removed": removed}
    emit(document, f"{fact} {address.host}", as_json=as_json)


def _resolve_login_address(settings: Settings, text: str | None) -> RegistryAddress:
    chosen = text or settings.registry
    if chosen is None:
        hint = "expertctl login HOST, or `expertctl config set registry HOST`"
        raise UsageError("no registry is named, and none is set", hint=hint)
    host = RegistryAddress.parse(chosen, allow_http=True).host
    known = TrustStore(settings.home.trust).read().find_registry(host)
    if known is not None and "://" not in chosen:
        chosen = known.url
    return RegistryAddress.parse(chosen, allow_http=settings.allow_http)


def _read_secret(address: RegistryAddress, *, from_stdin: bool) -> str:
    if from_stdin:
        text = sys.stdin.read(MAX_SECRET + 2)
    elif sys.stdin.isatty():
        text = typer.prompt(f"Token for {address.host}", hide_input=True, err=True)
    else:
        hint = "expertctl login HOST --token-stdin < FILE, or EXPERT_TOKEN with EXPERT_REGISTRY"
        raise UsageError("there is no terminal to ask for the token", hint=hint)
    return text.strip()


def _build_login_document(done: LoginResult) -> dict[str, object]:
    token = done.token
    return {
        "registry": done.address.host,
        "url": done.address.url,
        "user": done.credential.user,
        "admin": done.admin,
        "checked": done.checked,
        "scopes": list(token.scopes) if token else None,
        "expires": token.expires if token else None,
    }


def _format_login(done: LoginResult) -> str:
    lines = [f"logged in to {done.address.host} as {done.credential.user}"]
    if done.admin:
        lines.append("an administrator there")
    if done.token is not None:
        lines.append(f"token {done.token.name or done.token.id}: {_format_rights(done)}")
    return "\n".join(lines)


def _format_rights(done: LoginResult) -> str:
    token = done.token
    assert token is not None
    scopes = " ".join(token.scopes) or "all rights of the user"
    return f"{scopes}; {f'until {token.expires}' if token.expires else 'does not expire'}"


token_app = CommandGroup("Manage your access tokens of a registry.")


@token_app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the token is for.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", help="read, push:acme, push:acme/sql, …; repeatable; default: all."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="90d, 12h; default: never.")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a token with some of your rights. It is shown once, on stdout.

    Example: expertctl token new ci --scope push:acme --expires 90d
    """
    lifetime = parse_lifetime(expires) if expires is not None else None
    with connect(load_settings(), None, registry) as connection:
        made = create_token(connection.api, name, scopes=scope or [], lifetime=lifetime)
    document = {**_build_token_document(made), "registry": connection.host, "token": made.token}
    emit(document, made.token, as_json=as_json)
    limits = f"may: {', '.join(made.scopes) or 'everything you may'}"
    print_message(f"{made.id}  {limits}; expires: {made.expires or 'never'}; not shown again")


@token_app.command("list")
def list_access_tokens(registry: RegistryOption = None, as_json: JsonFlag = False) -> None:
    """List your tokens. Secrets are not stored.

    Example: expertctl token list
    """
    with connect(load_settings(), None, registry) as connection:
        found = list_tokens(connection.api)
    document = {
        "registry": connection.host,
        "tokens": [_build_token_document(token) for token in found],
    }
    emit(document, _format_tokens(found), as_json=as_json)


@token_app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `token list` shows it.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a token, at once and permanently.

    Example: expertctl token revoke 3f2a9c
    """
    with connect(load_settings(), None, registry) as connection:
        revoke_token(connection.api, token_id)
    document = {"registry": connection.host, "revoked": token_id}
    emit(document, f"revoked {token_id}", as_json=as_json)


def _build_token_document(token: AccessToken) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scopes": list(token.scopes),
        "created": token.created,
        "expires": token.expires,
        "last_used": token.last_used,
    }


def _format_tokens(found: list[AccessToken]) -> str:
    rows = [
        [
            to_single_line(token.id),
            to_single_line(token.name),
            to_single_line(" ".join(token.scopes)) or "all",
            format_minute(token.expires),
            format_minute(token.last_used),
        ]
        for token in found
    ]
    header = ["ID", "NAME", "SCOPES", "EXPIRES", "LAST USED"]
    return format_table(header, rows, shorten=("NAME", "SCOPES")) if rows else ""


def format_minute(time: str | None) -> str:
    """Return a time to the minute, so that the table fits a terminal."""
    return to_single_line(time[:16].replace("T", " ")) if time else "never"
