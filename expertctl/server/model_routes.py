"""The addresses of the models, which two published APIs have in common.

A client that sends ``anthropic-version`` is answered in the shape of the Anthropic API, all others
in that of OpenAI.
"""

import asyncio
import time
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.server.anthropic.models import model_info, model_page, page_wanted
from expertctl.server.error_bodies import MODELS, is_of_anthropic
from expertctl.server.openai.models import model_document, models_document
from expertctl.server.reply import json_reply
from expertctl.server.served_models import Model, model_named, served_models
from expertctl.server.service import Service


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses, on one engine."""
    wire = _Wire(service)
    return [
        Route(MODELS, wire.models, methods=["GET"]),
        Route(f"{MODELS}/{{name:path}}", wire.model, methods=["GET"]),
    ]


class _Wire:
    """Answers the requests of one server."""

    def __init__(self, service: Service) -> None:
        self._engine, self._aliases = service.engine, tuple(service.settings.aliases)
        self._since = int(time.time())

    async def models(self, request: Request) -> Response:
        """Answer with all models."""
        if not is_of_anthropic(request.scope):
            return json_reply(models_document(await self._models(), since=self._since))
        wanted = page_wanted(request.query_params)
        context = self._engine.context
        described = partial(model_info, since=self._since, context=context)
        return json_reply(model_page(await self._models(), wanted, described=described))

    async def model(self, request: Request) -> Response:
        """Answer with one model."""
        found = model_named(request.path_params["name"], await self._models())
        return json_reply(self._described(found, request))

    def _described(self, model: Model, request: Request) -> Struct:
        if is_of_anthropic(request.scope):
            return model_info(model, since=self._since, context=self._engine.context)
        return model_document(model, since=self._since)

    async def _models(self) -> tuple[Model, ...]:
        experts = await asyncio.wrap_future(self._engine.experts())
        return served_models(self._engine.base_name, experts, self._aliases)
