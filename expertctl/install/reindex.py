"""Making the catalogue, the routing vectors and verdicts again from the blobs of the store."""

from dataclasses import dataclass

from expertctl.errors import ExpertError
from expertctl.install.own_packages import own_packages
from expertctl.routing.index import RoutingIndex
from expertctl.routing.vetting import vet_again
from expertctl.schema.manifest import Manifest
from expertctl.settings import Home
from expertctl.store.catalogue import Catalogue
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.keys import KeyRing


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What is in the index now, and what could not be read."""

    experts: int
    warnings: tuple[str, ...]


def reindex(store: Store, *, catalogue: Catalogue, index: RoutingIndex) -> Reindexed:
    """Make the catalogue and the vectors again; the history of uses stays where it can be read.

    Raises:
        StoreError: when they cannot be written.
    """
    now = store.scan()
    warnings = [f"the record of {ref.name} is damaged: {ref.problem}" for ref in now.damaged]
    known: list[tuple[StoredExpert, Manifest]] = []
    for expert in now.experts:
        try:
            known.append((expert, store.manifest(expert)))
        except ExpertError as error:
            warnings.append(f"left out {expert.ref}: {error.message}")
    catalogue.rebuild(known)
    index.rebuild({expert.content_digest: manifest for expert, manifest in known})
    known.sort(key=lambda pair: _age(pair[0], store))
    own = own_packages((expert for expert, _ in known), KeyRing(Home(index.folder).keys))
    vet_again({expert.content_digest: manifest for expert, manifest in known}, index, own=own)
    return Reindexed(len(known), tuple(warnings))


def _age(expert: StoredExpert, store: Store) -> int:
    """Return when an expert was installed: what came first is no copy of what came later."""
    ref = store.paths.ref(expert.registry, expert.package, expert.version)
    return ref.stat().st_mtime_ns if ref.exists() else 0
