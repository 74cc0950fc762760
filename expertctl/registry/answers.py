"""What a registry answered, as typed values: the one place that turns its JSON into them.

Unknown fields are ignored, so that a newer registry can say more. Text stays as it came; the code
that shows it makes it harmless.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from expertctl.errors import (
    ExpertError,
    OfflineError,
    RateLimitError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
)
from expertctl.registry.api_client import ApiClient
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject

MAX_PAGES = 1000
PAGE = 100

Kind = TypeVar("Kind")


class Page(Protocol):
    """A part of a list; ``next`` is where the following part begins."""

    @property
    def next(self) -> str | None:
        """The cursor of the following part, None at the end."""
        ...


SomePage = TypeVar("SomePage", bound=Page)


def answer(document: JsonObject, kind: type[Kind], *, host: str) -> Kind:
    """Read an answer as a value of ``kind``.

    Raises:
        RegistryError: when it is something else.
    """
    try:
        return shape(document, kind)
    except msgspec.ValidationError as error:
        message = f"{host} answered with something else than was asked for: {error}"
        hint = f"is {host} a registry of this kind, and of a version that fits?"
        raise RegistryError(message, hint=hint) from error


def is_ours(api: ApiClient) -> bool:
    """Tell whether a registry speaks our API; another OCI registry does not.

    Raises:
        RegistryError: when it cannot be asked.
    """
    try:
        return "index_key" in api.get("")
    except (OfflineError, RateLimitError, UnauthenticatedError, UnreachableError):
        raise
    except ExpertError:
        return False


def pages(api: ApiClient, path: str, kind: type[SomePage]) -> Iterator[SomePage]:
    """Read a list part by part.

    Raises:
        RegistryError: when it is something else, or never ends.
    """
    wanted = {"limit": str(PAGE)}
    for _ in range(MAX_PAGES):
        page = answer(api.get(f"{path}?{urlencode(wanted)}"), kind, host=api.address.host)
        yield page
        if page.next is None:
            return
        wanted["cursor"] = page.next
    raise RegistryError(f"{api.address.host}: the list of {path} never ends")
