"""The values of ``model``: the base that is served, ``auto``, aliases, and each expert for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.server.model_name import AUTO, ModelNotFoundError

_OWNER = "expertctl"


@dataclass(frozen=True, slots=True)
class Model:
    """A name and its owner."""

    name: str
    owner: str


def served_models(
    base: str, experts: Sequence[ExpertHere], aliases: Iterable[str] = ()
) -> tuple[Model, ...]:
    """Return a model for every name; all versions of an expert share one."""
    usable = (one.expert for one in experts if one.fits and not one.expert.revoked)
    packages = sorted({expert.stored.package for expert in usable})
    return (
        Model(base, _OWNER),
        Model(AUTO, _OWNER),
        *(Model(alias, _OWNER) for alias in aliases),
        *(Model(str(package), package.namespace) for package in packages),
    )


def model_named(name: str, models: Sequence[Model]) -> Model:
    """Return one model.

    Raises:
        ModelNotFoundError: when there is no model of that name.
    """
    for model in models:
        if model.name == name:
            return model
    raise ModelNotFoundError(
        f"there is no model {name[:80]!r} here", hint="GET /v1/models lists them"
    )
