"""The list of models, as the OpenAI API has it."""

from collections.abc import Sequence

from msgspec import Struct

from expertctl.server.served_models import Model


class ModelDocument(Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    """One model, which has been there since the server began."""

    id: str
    created: int
    owned_by: str


class ModelsDocument(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All of them."""

    data: list[ModelDocument]


def models_document(models: Sequence[Model], *, since: int) -> ModelsDocument:
    """Return the list of models."""
    return ModelsDocument(data=[model_document(model, since=since) for model in models])


def model_document(model: Model, *, since: int) -> ModelDocument:
    """Return the document of a model."""
    return ModelDocument(id=model.name, created=since, owned_by=model.owner)
