"""The ``response_format`` of requests: our own words, and those of the OpenAI API."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.schema.strict_json import JsonObject

FormatType = Literal["text", "json", "json_object", "json_schema", "python", "sql", "custom"]
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema as the OpenAI API has it; ``strict`` changes nothing: it always is."""

    name: _Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer is to have.

    ``schema`` belongs to ``json_schema``, as does ``json_schema``, of which one is given; ``name``
    belongs to ``custom`` and is one that the server knows.
    """

    type: FormatType
    schema: dict[str, Any] | None = None
    json_schema: NamedSchema | None = None
    name: _Name | None = None

    @property
    def shown_schema(self) -> JsonObject | None:
        """The schema that a model may be shown; None without one."""
        if self.type != "json_schema":
            return None
        return self.schema or (self.json_schema.schema if self.json_schema else None)

    @property
    def is_json(self) -> bool:
        """Whether the answer is to be JSON."""
        return self.type in {"json", "json_object", "json_schema"}
