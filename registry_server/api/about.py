"""What this registry is: where a client begins, and the description of the API."""

from expertctl import __version__
from registry_server.api.operation import Context, Operation
from registry_server.api.wire import Output, Read


class IndexKey(Output, frozen=True):
    """The key that signs index documents; believe it only as somebody tells you its id."""

    key_id: str
    public_key: str


class About(Output, frozen=True):
    """A registry; ``read`` is who may read namespaces that do not say so themselves."""

    name: str
    version: str
    url: str
    read: Read
    index_key: IndexKey


def about(context: Context) -> About:
    """Say what this registry is."""
    settings, key = context.registry.settings, context.registry.index_key.public
    index_key = IndexKey(key.key_id, key.pem().decode())
    read: Read = "public" if settings.read == "public" else "token"
    return About("expertctl registry", __version__, settings.public_url, read, index_key)


OPERATIONS = (Operation("GET", "/api/v1/", about, "registry", anonymous=True),)
