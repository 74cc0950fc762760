"""A registry with the namespace ``acme``, ready to be run by itself."""

from collections.abc import Sequence
from pathlib import Path

from registry_server.operation.new_registry import NewRegistry
from registry_server.publishing.keys import add_key
from registry_server.settings import Limits
from tests.registry_server.operation.running import new_registry
from tests.registry_server.publishing.parcels import Parcel, push
from tests.registry_server.served import serve
from tests.store.shop import a_key

LIMITS = Limits(requests_per_minute=1_000_000, grace_seconds=0)


def grounds(folder: Path, parcels: Sequence[Parcel] = (), limits: Limits = LIMITS) -> NewRegistry:
    """Make a registry where everybody may read ``acme``, with these packages in it."""
    made = new_registry(folder, limits=limits)
    served = serve(made.settings)
    served.namespace("acme", kind="expert", read="public", owner="admin")
    admin = served.identity(made.token)
    key = a_key("acme").public.pem()
    add_key(served.registry, admin, namespace="acme", public_key=key, statement=None)
    for parcel in parcels:
        push(served.registry, admin, parcel)
    served.close()
    return made
