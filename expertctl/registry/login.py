"""Trying a login before it is kept: what the registry says about its user."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from expertctl.errors import ForbiddenError, UnauthenticatedError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.answers import is_ours
from expertctl.registry.api_client import ApiClient
from expertctl.registry.credentials import Credential, OneCredential
from expertctl.registry.http import Http, http_for
from expertctl.registry.oci_client import OciClient
from expertctl.registry.tokens import Token, whoami
from expertctl.settings import Settings
from expertctl.telling import Tell


@dataclass(frozen=True, slots=True)
class Login:
    """What a registry knows of the user."""

    address: RegistryAddress
    credential: Credential
    admin: bool = False
    token: Token | None = None
    """What our own registry says about the token; other registries say nothing."""
    checked: bool = True
    """False where a registry lets anybody in and so never checked the credential."""


def try_login(
    settings: Settings,
    address: RegistryAddress,
    credential: Credential,
    environment: Mapping[str, str],
    *,
    tell: Tell | None = None,
) -> Login:
    """Show a credential to its registry and return whom it identifies.

    Raises:
        UnauthenticatedError: when the registry does not accept it.
        UnreachableError: when it cannot be asked.
    """
    with http_for(settings, OneCredential(address, credential), environment, tell=tell) as http:
        if is_ours(ApiClient(http, address)):
            return _our_login(ApiClient(http, address), credential)
        OciClient(http, address).ping()
        return Login(address, credential, checked=_was_asked(http, address))


def reach(
    settings: Settings,
    address: RegistryAddress,
    environment: Mapping[str, str],
    *,
    tell: Tell | None = None,
) -> None:
    """Ask a registry for a sign of life, before a person is asked for a token.

    Raises:
        OfflineError: when the network is switched off.
        UnreachableError: when it cannot be asked.
    """
    with (
        http_for(settings, OneCredential(address, None), environment, tell=tell) as http,
        suppress(UnauthenticatedError, ForbiddenError),
    ):
        if not is_ours(ApiClient(http, address)):
            OciClient(http, address).ping()


def _our_login(api: ApiClient, credential: Credential) -> Login:
    found = whoami(api)
    if found.user is None:
        message = f"{api.address.host}: the token is not known there"
        raise UnauthenticatedError(message, hint="make one with `expertctl token new`, or ask")
    known = Credential(found.user, credential.secret, credential.realm)
    return Login(api.address, known, found.admin, found.token)


def _was_asked(http: Http, address: RegistryAddress) -> bool:
    return http.asked_who(address)
