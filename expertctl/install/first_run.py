"""Whether a home is new, so that the first run installs the starter pack: asked by every run."""

from expertctl.store.bases import BaseStore
from expertctl.store.store import Store


def is_new(store: Store, bases: BaseStore) -> bool:
    """Tell whether neither an expert nor a base is there."""
    return not store.experts() and not bases.bases()
