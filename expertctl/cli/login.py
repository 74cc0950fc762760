"""``expertctl login`` and ``logout``: the user's identity at a registry."""

import os
import sys
from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, emit, note, note_once
from expertctl.errors import UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import (
    DEFAULT_USER,
    MAX_SECRET,
    Credential,
    CredentialStore,
    from_environment,
)
from expertctl.registry.login import Login, reach, try_login
from expertctl.settings import Settings, load_settings
from expertctl.trust.policy import TrustStore

Registry = Annotated[
    str | None,
    typer.Argument(metavar="HOST", help="The registry; by default the one that is set."),
]


def login(
    registry: Registry = None,
    user: Annotated[
        str | None, typer.Option(help="The user name, where a registry goes by it.")
    ] = None,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Read the token from stdin, for scripts.")
    ] = False,
    realm: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Another host that may see the token, too."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a registry's token and save it. It is never taken from the arguments.

    Example: expertctl login registry.example.com
    """
    settings = load_settings()
    address = _address(settings, registry)
    found = None if token_stdin else from_environment(address, os.environ)
    if found is None and not token_stdin and sys.stdin.isatty():
        reach(settings, address, os.environ, tell=note_once())  # before a person is asked
    secret = found.secret if found else _secret(address, from_stdin=token_stdin)
    name = user or (found.user if found else DEFAULT_USER)
    other = RegistryAddress.parse(realm, allow_http=settings.allow_http).url if realm else None
    credential = Credential(name, secret, other)
    done = try_login(settings, address, credential, os.environ, tell=note_once())
    CredentialStore(settings.home.credentials).add(address, done.credential)
    if not done.checked:
        note(f"warning: {address.host} lets anybody in and did not look at the token")
    emit(_document(done), _text(done), as_json=as_json)


def logout(registry: Registry = None, as_json: JsonFlag = False) -> None:
    """Delete the saved token of a registry. The token itself stays valid until it is revoked.

    Example: expertctl logout registry.example.com
    """
    settings = load_settings()
    address = _address(settings, registry)
    removed = CredentialStore(settings.home.credentials).remove(address)
    fact = "logged out of" if removed else "there was no login for"
    document = {"registry": address.host, "url": address.url, "removed": removed}
    emit(document, f"{fact} {address.host}", as_json=as_json)


def _address(settings: Settings, text: str | None) -> RegistryAddress:
    chosen = text or settings.registry
    if chosen is None:
        hint = "expertctl login HOST, or `expertctl config set registry HOST`"
        raise UsageError("no registry is named, and none is set", hint=hint)
    host = RegistryAddress.parse(chosen, allow_http=True).host
    known = TrustStore(settings.home.trust).read().registry(host)
    if known is not None and "://" not in chosen:
        chosen = known.url
    return RegistryAddress.parse(chosen, allow_http=settings.allow_http)


def _secret(address: RegistryAddress, *, from_stdin: bool) -> str:
    if from_stdin:
        text = sys.stdin.read(MAX_SECRET + 2)
    elif sys.stdin.isatty():
        text = typer.prompt(f"Token for {address.host}", hide_input=True, err=True)
    else:
        hint = "expertctl login HOST --token-stdin < FILE, or EXPERT_TOKEN with EXPERT_REGISTRY"
        raise UsageError("there is no terminal to ask for the token", hint=hint)
    return text.strip()


def _document(done: Login) -> dict[str, object]:
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


def _text(done: Login) -> str:
    lines = [f"logged in to {done.address.host} as {done.credential.user}"]
    if done.admin:
        lines.append("an administrator there")
    if done.token is not None:
        lines.append(f"token {done.token.name or done.token.id}: {_rights(done)}")
    return "\n".join(lines)


def _rights(done: Login) -> str:
    token = done.token
    assert token is not None
    scopes = " ".join(token.scopes) or "all that the user may"
    return f"{scopes}; {f'until {token.expires}' if token.expires else 'does not expire'}"
