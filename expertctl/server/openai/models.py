"""What can be asked for as ``model``: the base that is served, ``auto``, each expert for it."""

from collections.abc import Iterator, Sequence

from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.model_name import AUTO, ModelNotFoundError

_OWNER = "expertctl"


def models_document(base: str, experts: Sequence[ExpertHere], *, since: int) -> JsonObject:
    """Return the list of models, which have been there ``since`` the server began."""
    models = list[JsonValue](_models(base, experts, since))
    return {"object": "list", "data": models}


def model_document(
    name: str, base: str, experts: Sequence[ExpertHere], *, since: int
) -> JsonObject:
    """Return one model.

    Raises:
        ModelNotFoundError: when there is none of that name.
    """
    for model in _models(base, experts, since):
        if model["id"] == name:
            return model
    raise ModelNotFoundError(
        f"there is no model {name[:80]!r} here", hint="GET /v1/models lists them"
    )


def _models(base: str, experts: Sequence[ExpertHere], since: int) -> Iterator[JsonObject]:
    """Yield a model for every name; the versions of an expert are one."""
    yield _model(base, since, _OWNER)
    yield _model(AUTO, since, _OWNER)
    usable = (one.expert for one in experts if one.fits and not one.expert.revoked)
    for package in sorted({expert.stored.package for expert in usable}):
        yield _model(str(package), since, package.namespace)


def _model(name: str, created: int, owner: str) -> JsonObject:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}
