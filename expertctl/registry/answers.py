"""What a registry answered, as typed values: the one place that turns its JSON into them.

Fields that are not known here are passed over, so that a newer registry can say more. Text stays
as it came; whoever shows it makes it harmless.
"""

from typing import TypeVar

import msgspec

from expertctl.errors import RegistryError
from expertctl.schema.strict_json import JsonObject

Kind = TypeVar("Kind")


def answer(document: JsonObject, kind: type[Kind], *, host: str) -> Kind:
    """Read an answer as a value of ``kind``.

    Raises:
        RegistryError: when it is something else.
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        message = f"{host} answered with something else than was asked for: {error}"
        hint = f"is {host} a registry of this kind, and of a version that fits?"
        raise RegistryError(message, hint=hint) from error
