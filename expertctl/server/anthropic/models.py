"""The list of models, as the Anthropic API has it: in pages that name their first and last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from starlette.datastructures import QueryParams

from expertctl.routing.presets import LIMITS
from expertctl.server.field_error import FieldError
from expertctl.server.served_models import Model

USUAL, MOST = 20, 1000
"""How many models a page has by default, and at most."""
_LIFECYCLE = "lifecycle[]"
_KNOWN = frozenset({"limit", "before_id", "after_id", _LIFECYCLE, "beta"})
"""The parameters that a query may have; ``beta`` changes nothing."""
_STAGES = frozenset({"active", "deprecated", "retired"})


class ModelInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """One model, which has been there since the server began."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct, frozen=True, kw_only=True):
    """Some of them; ``has_more`` in the direction that was asked for."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWanted:
    """Which models are wanted: at most ``limit``, before or after a given one."""

    limit: int = USUAL
    before: str | None = None
    after: str | None = None
    active: bool = True
    """Whether active models are wanted; all models here are active."""


def page_wanted(query: QueryParams) -> PageWanted:
    """Read the query of a request.

    Raises:
        FieldError: when it asks for what is not done here.
    """
    for name, _ in query.multi_items():
        if name not in _KNOWN:
            raise FieldError(f"{name[:80]}: this server does not do that", field=name[:80])
    before, after = query.get("before_id"), query.get("after_id")
    if before is not None and after is not None:
        raise FieldError("before_id: it cannot be given with after_id", field="before_id")
    stages = query.getlist(_LIFECYCLE)
    if not _STAGES.issuperset(stages):
        words = ", ".join(sorted(_STAGES))
        raise FieldError(f"lifecycle: it must be of {words}", field="lifecycle")
    return PageWanted(
        limit=_limit(query.get("limit")),
        before=before,
        after=after,
        active=not stages or "active" in stages,
    )


def model_page(
    models: Sequence[Model], wanted: PageWanted, *, described: Callable[[Model], ModelInfo]
) -> ModelPage:
    """Return a page of models.

    Raises:
        FieldError: when the model that the page should adjoin does not exist.
    """
    first, end = 0, len(models)
    if wanted.after is not None:
        first = _place(models, wanted.after, "after_id") + 1
    if wanted.before is not None:
        end = _place(models, wanted.before, "before_id")
    here = models[first:end] if wanted.active else ()
    shown = here[: wanted.limit] if wanted.before is None else here[-wanted.limit :]
    return ModelPage(
        data=[described(model) for model in shown],
        has_more=len(shown) < len(here),
        first_id=shown[0].name if shown else None,
        last_id=shown[-1].name if shown else None,
    )


def model_info(model: Model, *, since: int, context: int) -> ModelInfo:
    """Return the document of a model; ``context`` is how many tokens the base reads."""
    _, most = LIMITS["max_tokens"]
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(since, UTC).isoformat().replace("+00:00", "Z"),
        lifecycle="active",
        max_input_tokens=context,
        max_tokens=min(int(most), context),
    )


def _limit(given: str | None) -> int:
    if given is None:
        return USUAL
    known = given.isascii() and given.isdigit() and len(given) <= len(str(MOST))
    if not known or not 1 <= int(given) <= MOST:
        raise FieldError(f"limit: it must be a number from 1 to {MOST}", field="limit")
    return int(given)


def _place(models: Sequence[Model], name: str, field: str) -> int:
    for place, model in enumerate(models):
        if model.name == name:
            return place
    raise FieldError(f"{field}: there is no model {name[:80]!r} here", field=field)
