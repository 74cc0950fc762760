"""Making the catalogue and the routing vectors again from the blobs of the store."""

from dataclasses import dataclass

from expertctl.errors import ExpertError
from expertctl.routing.index import RoutingIndex
from expertctl.schema.manifest import Manifest
from expertctl.store.catalogue import Catalogue
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store


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
    return Reindexed(len(known), tuple(warnings))
