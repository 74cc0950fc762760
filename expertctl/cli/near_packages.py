"""Suggests names for experts that are nowhere: of those installed, and those of their registry."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from expertctl.errors import ExpertError, NotFoundError, UsageError
from expertctl.install.sources import Sources
from expertctl.reference import PackageName, Reference
from expertctl.registry.api_client import ApiClient
from expertctl.registry.package_pages import search
from expertctl.store.store import Store, near_names

_MOST_HITS = 100


def suggest_names(
    error: NotFoundError, wanted: Iterable[Reference], sources: Sources, store: Store
) -> NotFoundError:
    """Return an error about a reference that is not there, with the names that may be meant."""
    missing = next((each for each in wanted if error.message.startswith(f"{each} ")), None)
    if missing is None:
        return error
    names = {*_installed(store), *_offered(missing, sources)} - {str(missing.package)}
    near = near_names(str(missing.package), sorted(names))
    if not near:
        return error
    meant = f"did you mean {' or '.join(near)}?"
    return NotFoundError(error.message, hint=meant)


def _installed(store: Store) -> Iterator[str]:
    with suppress(ExpertError, OSError):  # the error to report is another one
        yield from (str(expert.package) for expert in store.scan().experts)


def _offered(missing: Reference, sources: Sources) -> Iterator[str]:
    """Yield the packages of the namespace, and those of other namespaces with that name."""
    if sources.settings.offline:
        return
    with suppress(ExpertError):
        api = ApiClient(sources.http, sources.address(missing, by_hand=True))
        for text in (missing.package.namespace, missing.package.name):
            found = (hit.name for hit in search(api, text, limit=_MOST_HITS).results)
            yield from filter(is_package_name, found)


def is_package_name(text: str) -> bool:
    """Tell whether a text of a registry is the name of a package, and so may stand in a hint."""
    try:
        return str(PackageName.parse(text)) == text
    except UsageError:
        return False
