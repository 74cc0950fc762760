"""Lists: the tags of a repository, and what refers to a manifest; in pages, with ``Link``."""

import json
import re
from urllib.parse import urlencode

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.package.layout import INDEX_TYPE
from registry_server.access.identity import Action
from registry_server.oci import referrers, repositories, tags
from registry_server.oci.access import authorise
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.names import MAX_TAG, read_digest
from registry_server.oci.referrers import Page
from registry_server.oci.requests import asker, repository_name
from registry_server.registry import Registry

MAX_PAGE = 1000
_NUMBER = re.compile(r"\d{1,12}", re.ASCII)
_MAX_TYPE = 255


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the addresses of lists."""
    requests = _ListRequests(registry)
    return [
        Route("/v2/{name:path}/tags/list", requests.tags, methods=["GET"]),
        Route("/v2/{name:path}/referrers/{digest}", requests.referrers, methods=["GET"]),
    ]


class _ListRequests:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def tags(self, request: Request) -> Response:
        """GET: tags in the order of their bytes, behind ``last``."""
        name, limit = repository_name(request), _limit(request.query_params.get("n"))
        last = request.query_params.get("last", "")
        if len(last) > MAX_TAG:
            raise OciError(OciCode.TAG_INVALID, "last is longer than a tag")
        found = await to_thread.run_sync(self._tags, request, last, limit + 1)
        shown, headers = found[:limit], {"Cache-Control": "no-cache"}
        if len(found) > limit > 0:
            query = {"last": shown[-1], "n": str(limit)}
            headers["Link"] = _next(f"/v2/{name}/tags/list", query)
        return _json({"name": str(name), "tags": shown}, "application/json", headers)

    async def referrers(self, request: Request) -> Response:
        """GET: what refers to a manifest, which need not be there; perhaps of one kind only."""
        asked = request.query_params
        artifact_type = asked.get("artifactType")
        page = await to_thread.run_sync(self._referrers, request, artifact_type)
        headers = {"Cache-Control": "no-cache"}
        if artifact_type is not None:
            headers["OCI-Filters-Applied"] = "artifactType"
        if page.next is not None:
            kept = {} if artifact_type is None else {"artifactType": artifact_type}
            headers["Link"] = _next(request.url.path, {**kept, "last": page.next})
        body = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": page.descriptors}
        return _json(body, INDEX_TYPE, headers)

    def _tags(self, request: Request, last: str, limit: int) -> list[str]:
        name = repository_name(request)
        with self._registry.database.read() as connection:
            authorise(connection, asker(request), Action.READ, name)
            repository = repositories.find(connection, str(name))
            if repository is None:
                raise OciError(OciCode.NAME_UNKNOWN, f"nothing was pushed to {name}")
            return tags.names(connection, repository.id, after=last, limit=limit)

    def _referrers(self, request: Request, artifact_type: str | None) -> Page:
        name, subject = repository_name(request), read_digest(request.path_params["digest"])
        last = request.query_params.get("last", "")
        if artifact_type is not None and len(artifact_type) > _MAX_TYPE:
            raise OciError(OciCode.MANIFEST_INVALID, "artifactType is too long")
        with self._registry.database.read() as connection:
            authorise(connection, asker(request), Action.READ, name)
            repository = repositories.find(connection, str(name))
            if repository is None:
                return Page([], None)
            after = str(read_digest(last)) if last else ""
            return referrers.page(
                connection,
                repository.id,
                subject=str(subject),
                artifact_type=artifact_type,
                after=after,
            )


def _limit(text: str | None) -> int:
    """Return how many tags are asked for, at most a page; without a number, a page."""
    if text is None:
        return MAX_PAGE
    if not _NUMBER.fullmatch(text):
        raise OciError(OciCode.PAGE_INVALID, f"n={text[:40]!r} is not a number of tags")
    return min(int(text), MAX_PAGE)


def _next(path: str, query: dict[str, str]) -> str:
    return f'<{path}?{urlencode(query)}>; rel="next"'


def _json(body: object, media_type: str, headers: dict[str, str]) -> Response:
    return Response(json.dumps(body), headers=headers, media_type=media_type)
