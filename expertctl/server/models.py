"""The model list: the served base, ``auto``, aliases, and every expert that fits the base.

``/v1/models`` belongs to two published APIs: a client that sends ``anthropic-version`` gets the
Anthropic form, in pages that name their first and last model; all others get OpenAI's.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.routing import BaseRoute

from expertctl.engine.serving.request import AdapterStatus
from expertctl.http.operation import FieldError, Operation
from expertctl.schema.strict_json import JsonObject
from expertctl.server.request_body import build_router
from expertctl.server.responses import MODELS, is_anthropic_request
from expertctl.server.service import Service
from expertctl.server.settings import AUTO, ModelNotFoundError
from expertctl.user_request import LIMITS

_OWNER = "expertctl"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model name and its owner."""

    name: str
    owner: str


def list_served_models(
    base: str, experts: Sequence[AdapterStatus], aliases: Iterable[str] = ()
) -> tuple[ServedModel, ...]:
    """Return a model for every name; all versions of an expert share one name."""
    usable = (one.expert for one in experts if one.fits and not one.expert.revoked)
    packages = sorted({expert.stored.package for expert in usable})
    return (
        ServedModel(base, _OWNER),
        ServedModel(AUTO, _OWNER),
        *(ServedModel(alias, _OWNER) for alias in aliases),
        *(ServedModel(str(package), package.namespace) for package in packages),
    )


def find_model(name: str, models: Sequence[ServedModel]) -> ServedModel:
    """Return the model of a name.

    Raises:
        ModelNotFoundError: when there is no model of that name.
    """
    for model in models:
        if model.name == name:
            return model
    raise ModelNotFoundError(
        f"there is no model {name[:80]!r} here", hint="GET /v1/models lists them"
    )


class ModelDocument(Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    """A model; ``created`` is the start of the server."""

    id: str
    created: int
    owned_by: str


class ModelsDocument(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The list of all models."""

    data: list[ModelDocument]


def build_models_document(models: Sequence[ServedModel], *, since: int) -> ModelsDocument:
    """Return the OpenAI document of all models."""
    return ModelsDocument(data=[build_model_document(model, since=since) for model in models])


def build_model_document(model: ServedModel, *, since: int) -> ModelDocument:
    """Return the OpenAI document of a model."""
    return ModelDocument(id=model.name, created=since, owned_by=model.owner)


DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 20, 1000
"""Models per page, by default and at most."""
_LIFECYCLE = "lifecycle[]"
_QUERY_PARAMETERS = frozenset({"limit", "before_id", "after_id", _LIFECYCLE, "beta"})
"""Accepted query parameters; ``beta`` is ignored."""
_LIFECYCLE_STAGES = frozenset({"active", "deprecated", "retired"})


class ModelInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """A model; ``created`` is the start of the server."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct, frozen=True, kw_only=True):
    """A page of models; ``has_more`` refers to the requested direction."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPageQuery:
    """A page request: at most ``limit`` models before or after a given one."""

    limit: int = DEFAULT_PAGE_SIZE
    before: str | None = None
    after: str | None = None
    active: bool = True
    """Whether active models are requested; all models here are active."""


def parse_page_query(query: QueryParams) -> ModelPageQuery:
    """Parse the query of a request for a page.

    Raises:
        FieldError: when a parameter is unsupported or invalid.
    """
    for name, _ in query.multi_items():
        if name not in _QUERY_PARAMETERS:
            raise FieldError.at(name[:80], "not supported by this server")
    before, after = query.get("before_id"), query.get("after_id")
    if before is not None and after is not None:
        raise FieldError.at("before_id", "it cannot be combined with after_id")
    stages = query.getlist(_LIFECYCLE)
    if not _LIFECYCLE_STAGES.issuperset(stages):
        words = ", ".join(sorted(_LIFECYCLE_STAGES))
        raise FieldError.at("lifecycle", f"it must be one of {words}")
    return ModelPageQuery(
        limit=_parse_limit(query.get("limit")),
        before=before,
        after=after,
        active=not stages or "active" in stages,
    )


def build_model_page(
    models: Sequence[ServedModel],
    query: ModelPageQuery,
    *,
    describe: Callable[[ServedModel], ModelInfo],
) -> ModelPage:
    """Return the requested page of models.

    Raises:
        FieldError: when the model before or after the page does not exist.
    """
    first, end = 0, len(models)
    if query.after is not None:
        first = _find_position(models, query.after, "after_id") + 1
    if query.before is not None:
        end = _find_position(models, query.before, "before_id")
    here = models[first:end] if query.active else ()
    shown = here[: query.limit] if query.before is None else here[-query.limit :]
    return ModelPage(
        data=[describe(model) for model in shown],
        has_more=len(shown) < len(here),
        first_id=shown[0].name if shown else None,
        last_id=shown[-1].name if shown else None,
    )


def build_model_info(model: ServedModel, *, since: int, context: int) -> ModelInfo:
    """Return the Anthropic document of a model; ``context`` is in tokens."""
    _, most = LIMITS["max_tokens"]
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=datetime.fromtimestamp(since, UTC).isoformat().replace("+00:00", "Z"),
        lifecycle="active",
        max_input_tokens=context,
        max_tokens=min(int(most), context),
    )


def _parse_limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE_SIZE
    known = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_PAGE_SIZE))
    if not known or not 1 <= int(given) <= MAX_PAGE_SIZE:
        raise FieldError.at("limit", f"it must be a number from 1 to {MAX_PAGE_SIZE}")
    return int(given)


def _find_position(models: Sequence[ServedModel], name: str, field: str) -> int:
    for place, model in enumerate(models):
        if model.name == name:
            return place
    raise FieldError.at(field, f"there is no model {name[:80]!r} here")


def build_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the models."""
    router = build_router(ModelEndpoints(service), strict=service.settings.strict_fields)
    return router.build_routes(OPERATIONS)


class ModelPath(Struct, frozen=True):
    """Identifies a model, by a name that may contain slashes."""

    name: Annotated[str, Meta(min_length=1)]


class ModelEndpoints:
    """Handles requests for models."""

    def __init__(self, service: Service) -> None:
        """Describe the models of ``service``, which starts now."""
        self._engine, self._aliases = service.engine, tuple(service.settings.aliases)
        self._started_at = int(time.time())

    async def list_models(self, request: Request) -> ModelsDocument | ModelPage:
        """List the models that a request can name."""
        if not is_anthropic_request(request.scope):
            return build_models_document(await self._list_models(), since=self._started_at)
        wanted = parse_page_query(request.query_params)
        context = self._engine.context
        described = partial(build_model_info, since=self._started_at, context=context)
        return build_model_page(await self._list_models(), wanted, describe=described)

    async def retrieve_model(self, request: Request, path: ModelPath) -> ModelDocument | ModelInfo:
        """Describe one model."""
        model = find_model(path.name, await self._list_models())
        if is_anthropic_request(request.scope):
            return build_model_info(model, since=self._started_at, context=self._engine.context)
        return build_model_document(model, since=self._started_at)

    async def _list_models(self) -> tuple[ServedModel, ...]:
        experts = await asyncio.wrap_future(self._engine.list_experts())
        return list_served_models(self._engine.base_name, experts, self._aliases)


def _describe_parameter(name: str, words: str, *, place: str = "query") -> JsonObject:
    schema: JsonObject = {"type": "string", "description": words}
    return {"name": name, "in": place, "schema": schema}


_VERSION_PARAMETER = _describe_parameter(
    "anthropic-version", "Selects the answer of that API.", place="header"
)
_PAGING_PARAMETERS = (
    _VERSION_PARAMETER,
    _describe_parameter("limit", "From 1 to 1000; with the header of Anthropic's API"),
    _describe_parameter("before_id", "The page ends before this model; with the header"),
    _describe_parameter("after_id", "The page begins after this model; with the header"),
)
OPERATIONS = (
    Operation("GET", MODELS, ModelEndpoints.list_models, "openai", parameters=_PAGING_PARAMETERS),
    Operation(
        "GET",
        f"{MODELS}/{{name:path}}",
        ModelEndpoints.retrieve_model,
        "openai",
        errors=(404,),
        parameters=(_VERSION_PARAMETER,),
    ),
)
