"""What shells complete: installed experts, packages of known registries, bases, keys, settings.

Each function takes the word so far, which typer passes by name, and reads only local files. A
shell completes file names where nothing is returned, so a damaged home is no error here.
"""

from collections.abc import Callable, Iterable
from functools import wraps

from expertctl.errors import ExpertError
from expertctl.settings import CONFIG_KEYS, Home, find_home

_List = Callable[[Home], Iterable[str]]


def _completion(list_names: _List) -> Callable[[str], list[str]]:
    """Return a function for typer that returns those names that begin with the word so far."""

    @wraps(list_names, assigned=("__doc__", "__name__"), updated=())
    def complete(incomplete: str) -> list[str]:
        try:
            return sorted({each for each in list_names(find_home()) if each.startswith(incomplete)})
        except (ExpertError, OSError):
            return []

    del complete.__wrapped__  # typer would look at its signature
    return complete


@_completion
def complete_experts(home: Home) -> Iterable[str]:
    """List installed experts, by name and with their versions."""
    from expertctl.store.store import Store

    for expert in Store(home.store).list_experts():
        name, _, _ = expert.ref.partition("@")
        yield from (name, expert.ref)


@_completion
def complete_packages(home: Home) -> Iterable[str]:
    """List the packages whose index documents known registries have sent."""
    from expertctl.registry.index_store import IndexStore
    from expertctl.trust.trust_store import TrustStore

    indexes = IndexStore(home.registries)
    for registry in TrustStore(home.trust).read().registries:
        yield from map(str, indexes.list_packages(registry))


@_completion
def complete_bases(home: Home) -> Iterable[str]:
    """List the bases."""
    from expertctl.store.bases import BaseStore

    return (base.name for base in BaseStore(home.bases).list_bases())


@_completion
def complete_own_keys(home: Home) -> Iterable[str]:
    """List the user's keys."""
    from expertctl.trust.keys import KeyRing

    return KeyRing(home.keys).list_names()


@_completion
def complete_trusted_keys(home: Home) -> Iterable[str]:
    """List the trusted keys."""
    from expertctl.trust.trust_store import TrustStore

    return (key.name for key in TrustStore(home.trust).list_keys())


@_completion
def complete_registries(home: Home) -> Iterable[str]:
    """List the registries whose keys are known."""
    from expertctl.trust.trust_store import TrustStore

    return (registry.host for registry in TrustStore(home.trust).read().registries)


@_completion
def complete_settings(_: Home) -> Iterable[str]:
    """List the settings."""
    return CONFIG_KEYS
