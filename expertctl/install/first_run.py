"""Whether a home is new, so that the first run installs the starter pack: asked by every run."""

from expertctl.routing.base_choice import DEMO
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store

NAMESPACE = "starter"
"""The namespace of the starter pack."""


def is_new(store: Store, bases: BaseStore) -> bool:
    """Tell whether neither an expert nor a base is there."""
    return not store.experts() and not bases.bases()


def lacks_starter(store: Store, bases: BaseStore) -> bool:
    """Tell whether neither the base nor an expert of the starter pack is there."""
    of_pack = (expert for expert in store.experts() if expert.package.namespace == NAMESPACE)
    return all(base.name != DEMO for base in bases.bases()) and next(of_pack, None) is None
