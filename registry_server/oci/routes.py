"""The routes below ``/v2/``: manifests by tag or digest, lists of tags and referrers; ``/token``.

In a namespace for packages, the PUT of a tag publishes a version; nothing else writes there. Lists
come in pages, with ``Link`` headers. There is no ``_catalog``: it is not part of the specification
and would reveal names to users who may not read them; ``/api/v1`` lists what a user may read.

``/token`` implements docker's token authentication: a 401 response names it as the realm, a client
requests it with Basic or without credentials, and then repeats its request with the session token,
limited to the requested scopes, as its bearer token.
"""

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlencode

from anyio import to_thread
from sqlalchemy import Connection
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import (
    DiskFullError,
    ForbiddenError,
    NotFoundError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
)
from expertctl.package.layout import INDEX_TYPE
from registry_server.access import namespaces, rights
from registry_server.access.accounts import SESSION_SECONDS, SessionKey, parse_requested_scopes
from registry_server.access.rights import (
    MAX_TAG_LENGTH,
    Action,
    Identity,
    RepositoryAccess,
    RepositoryName,
    TokenScope,
    authorise_repository,
    current_identity,
    parse_digest,
    parse_reference,
    parse_tag,
    read_repository_name,
)
from registry_server.errors import OciCode, OciError
from registry_server.oci import blobs, manifests, upload_routes
from registry_server.oci.blobs import immutable_cache_control, matches_etag
from registry_server.oci.manifests import ReferrerPage, StoredManifest, parse_manifest
from registry_server.oci.upload_routes import read_content_length
from registry_server.oci.uploads import require_free_space
from registry_server.publishing.releases import publish
from registry_server.registry import BlobDigest, Registry

MAX_TAGS_PER_PUT = 64
"""Maximum ``tag`` parameters of a PUT."""


def make_manifest_routes(registry: Registry) -> list[BaseRoute]:
    """Return the route of manifests."""
    requests = _ManifestEndpoints(registry)
    address = "/v2/{name:path}/manifests/{reference}"
    return [
        Route(address, requests.get, methods=["GET"]),
        Route(address, requests.put, methods=["PUT"]),
        Route(address, requests.remove, methods=["DELETE"]),
    ]


class _ManifestEndpoints:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, request: Request) -> Response:
        """Handle GET or HEAD: short reads, cheaper here than a thread switch."""
        name = read_repository_name(request)
        with self._registry.database.read() as connection:
            target = authorise_repository(connection, current_identity(request), Action.READ, name)
            reference = _read_existing_reference(request)
            found = manifests.find_manifest_by_reference(connection, str(name), reference)
        if found is None:
            raise OciError(OciCode.MANIFEST_UNKNOWN, f"{name} has no manifest {reference}")
        by_digest = isinstance(reference, BlobDigest)
        headers = _manifest_headers(
            found, immutable_cache_control(target) if by_digest else "private, no-cache"
        )
        if matches_etag(request.headers, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        later = self._count_download(name, found) if request.method == "GET" else None
        return Response(
            found.content, headers=headers, media_type=found.media_type, background=later
        )

    async def put(self, request: Request) -> Response:
        """Handle PUT: store a manifest and point tags to it, or publish a version."""
        name, reference = (
            read_repository_name(request),
            parse_reference(_reference_parameter(request)),
        )
        identity = current_identity(request)
        target = await to_thread.run_sync(self._authorise_push, identity, name)
        if target.holds_packages:
            tag = _require_version_tag(target, reference, request)
            return await self._publish(identity, name, tag, await self._read_body(request))
        named = [parse_tag(tag) for tag in request.query_params.getlist("tag")]
        if len(named) > MAX_TAGS_PER_PUT:
            raise OciError(OciCode.TAG_INVALID, f"more than {MAX_TAGS_PER_PUT} tags at once")
        content, kind = await self._read_body(request), request.headers.get("content-type")
        return await to_thread.run_sync(
            self._store, identity, name, reference, content, kind, named
        )

    async def remove(self, request: Request) -> Response:
        """Handle DELETE: remove a tag, or a manifest with all tags that point to it."""
        await to_thread.run_sync(self._remove, request)
        return Response(status_code=202)

    def _authorise_push(self, identity: Identity, name: RepositoryName) -> RepositoryAccess:
        settings = self._registry.settings
        require_free_space(
            settings.data, settings.limits.manifest_bytes, min_free_bytes=settings.limits.free_bytes
        )
        with self._registry.database.read() as connection:
            return authorise_repository(connection, identity, Action.PUSH, name)

    async def _publish(
        self, identity: Identity, name: RepositoryName, tag: str, content: bytes
    ) -> Response:
        def run() -> BlobDigest:
            done = publish(
                self._registry, identity, name=name.as_package_name(), tag=tag, manifest=content
            )
            return BlobDigest.parse(str(done.package_digest))

        digest = await to_thread.run_sync(run)
        return _created_response(name, digest, {"OCI-Tag": tag})

    async def _read_body(self, request: Request) -> bytes:
        limit = self._registry.settings.limits.manifest_bytes
        error = TooLargeError(f"a manifest has at most {limit} bytes")
        length = read_content_length(request)
        if length is not None and length > limit:
            raise error
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise error
        return b"".join(parts)

    def _store(
        self,
        identity: Identity,
        name: RepositoryName,
        reference: BlobDigest | str,
        content: bytes,
        content_type: str | None,
        extra_tags: list[str],
    ) -> Response:
        limits = self._registry.settings.limits
        digest = _verify_digest(content, reference)
        media_type = content_type.partition(";")[0].strip() if content_type else None
        document = parse_manifest(content, media_type=media_type, max_bytes=limits.manifest_bytes)
        all_tags = [*([reference] if isinstance(reference, str) else []), *extra_tags]
        with self._registry.database.write() as connection:
            target = authorise_repository(connection, identity, Action.PUSH, name)
            target.require_plain_oci("storing manifests")
            repository = rights.get_or_create_repository(
                connection, name=str(name), namespace_id=target.namespace.id
            )
            manifests.require_references(connection, repository.id, document)
            if manifests.find_manifest(connection, repository.id, str(digest)) is None:
                namespaces.require_quota(connection, target.namespace, len(content), limits)
            manifests.store_manifest(
                connection,
                repository_id=repository.id,
                digest=digest,
                document=document,
                content=content,
            )
            for tag in all_tags:
                manifests.set_tag(
                    connection, repository_id=repository.id, tag=tag, digest=str(digest)
                )
            pushed = f"{name}@{digest}"
            rights.write_audit_row(
                connection, identity, "manifest.push", pushed, " ".join(all_tags)
            )
        subject = {"OCI-Subject": str(document.subject)} if document.subject else {}
        response = _created_response(name, digest, subject)
        for tag in all_tags:
            response.headers.append("OCI-Tag", tag)
        return response

    def _remove(self, request: Request) -> None:
        name = read_repository_name(request)
        with self._registry.database.write() as connection:
            target = authorise_repository(
                connection, current_identity(request), Action.DELETE, name
            )
            target.require_plain_oci("removing manifests")
            reference = _read_existing_reference(request)
            repository = rights.find_repository(connection, str(name))
            remove = (
                manifests.remove_manifest
                if isinstance(reference, BlobDigest)
                else manifests.remove_tag
            )
            if repository is None or not remove(connection, repository.id, str(reference)):
                raise OciError(OciCode.MANIFEST_UNKNOWN, f"{name} has no manifest {reference}")
            by_digest = isinstance(reference, BlobDigest)
            action, removed = (
                ("manifest", f"@{reference}") if by_digest else ("tag", f":{reference}")
            )
            rights.write_audit_row(
                connection, current_identity(request), f"{action}.remove", f"{name}{removed}"
            )

    def _count_download(self, name: RepositoryName, found: StoredManifest) -> BackgroundTask | None:
        """Count a fetch; return the task to run after the response, if any.

        Counts that cannot be written are kept, and later requests are answered as usual.
        """
        downloads = self._registry.downloads
        if not downloads.count(str(name), found.digest):
            return None

        def write() -> None:
            with suppress(StoreError, DiskFullError):
                downloads.flush(self._registry.database)

        return BackgroundTask(write)


def _read_existing_reference(request: Request) -> BlobDigest | str:
    """Parse the reference of an existing manifest.

    Raises:
        OciError: MANIFEST_UNKNOWN when it is invalid: nothing can be stored under it, and the
            conformance tests of the specification expect 404.
    """
    try:
        return parse_reference(_reference_parameter(request))
    except OciError as error:
        raise OciError(OciCode.MANIFEST_UNKNOWN, error.message) from error


def _reference_parameter(request: Request) -> str:
    text: str = request.path_params["reference"]
    return text


def _require_version_tag(
    target: RepositoryAccess, reference: BlobDigest | str, request: Request
) -> str:
    if isinstance(reference, BlobDigest) or "tag" in request.query_params:
        target.require_plain_oci("storing manifests without a version")
    return str(reference)


def _verify_digest(content: bytes, reference: BlobDigest | str) -> BlobDigest:
    if isinstance(reference, str):
        return BlobDigest.compute(content)
    found = BlobDigest.compute(content, algorithm=reference.algorithm)
    if found != reference:
        raise OciError(OciCode.DIGEST_INVALID, f"the manifest has the digest {found}")
    return found


def _manifest_headers(found: StoredManifest, cache: str) -> dict[str, str]:
    return {
        "Docker-Content-Digest": found.digest,
        "ETag": f'"{found.digest}"',
        "Cache-Control": cache,
        "Vary": "Authorization",
        "X-Content-Type-Options": "nosniff",
    }


def _created_response(
    name: RepositoryName, digest: BlobDigest, headers: dict[str, str]
) -> Response:
    location = f"/v2/{name}/manifests/{digest}"
    own = {"Location": location, "Docker-Content-Digest": str(digest)}
    return Response(status_code=201, headers={**own, **headers})


MAX_TAGS_PER_PAGE = 1000
_NUMBER = re.compile(r"\d{1,12}", re.ASCII)
_MAX_ARTIFACT_TYPE = 255


def make_listing_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of lists."""
    requests = _ListingEndpoints(registry)
    return [
        Route("/v2/{name:path}/tags/list", requests.tags, methods=["GET"]),
        Route("/v2/{name:path}/referrers/{digest}", requests.referrers, methods=["GET"]),
    ]


class _ListingEndpoints:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def tags(self, request: Request) -> Response:
        """Handle GET: list the tags after ``last``, sorted by their bytes."""
        name, limit = read_repository_name(request), _parse_page_size(request.query_params.get("n"))
        last = request.query_params.get("last", "")
        if len(last) > MAX_TAG_LENGTH:
            raise OciError(OciCode.TAG_INVALID, "last is longer than a tag")
        found = await to_thread.run_sync(self._load_tags, request, last, limit + 1)
        shown, headers = found[:limit], {"Cache-Control": "no-cache"}
        if len(found) > limit > 0:
            query = {"last": shown[-1], "n": str(limit)}
            headers["Link"] = _next_link(f"/v2/{name}/tags/list", query)
        return _json_response({"name": str(name), "tags": shown}, "application/json", headers)

    async def referrers(self, request: Request) -> Response:
        """Handle GET: list the referrers of a digest, optionally of one type; it need not exist."""
        query = request.query_params
        artifact_type = query.get("artifactType")
        page = await to_thread.run_sync(self._load_referrers, request, artifact_type)
        headers = {"Cache-Control": "no-cache"}
        if artifact_type is not None:
            headers["OCI-Filters-Applied"] = "artifactType"
        if page.next is not None:
            kept = {} if artifact_type is None else {"artifactType": artifact_type}
            headers["Link"] = _next_link(request.url.path, {**kept, "last": page.next})
        body = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": page.descriptors}
        return _json_response(body, INDEX_TYPE, headers)

    def _load_tags(self, request: Request, last: str, limit: int) -> list[str]:
        name = read_repository_name(request)
        with self._registry.database.read() as connection:
            authorise_repository(connection, current_identity(request), Action.READ, name)
            repository = rights.find_repository(connection, str(name))
            if repository is None:
                raise OciError(OciCode.NAME_UNKNOWN, f"nothing was pushed to {name}")
            return manifests.list_tags(connection, repository.id, after=last, limit=limit)

    def _load_referrers(self, request: Request, artifact_type: str | None) -> ReferrerPage:
        name, subject = read_repository_name(request), parse_digest(request.path_params["digest"])
        last = request.query_params.get("last", "")
        if artifact_type is not None and len(artifact_type) > _MAX_ARTIFACT_TYPE:
            raise OciError(OciCode.MANIFEST_INVALID, "artifactType is too long")
        with self._registry.database.read() as connection:
            authorise_repository(connection, current_identity(request), Action.READ, name)
            repository = rights.find_repository(connection, str(name))
            if repository is None:
                return ReferrerPage([], None)
            after = str(parse_digest(last)) if last else ""
            return manifests.list_referrers(
                connection,
                repository.id,
                subject=str(subject),
                artifact_type=artifact_type,
                after=after,
            )


def _parse_page_size(text: str | None) -> int:
    """Return the requested number of tags, which by default and at most is a page."""
    if text is None:
        return MAX_TAGS_PER_PAGE
    if not _NUMBER.fullmatch(text):
        raise OciError(OciCode.PAGE_INVALID, f"n={text[:40]!r} is not a number of tags")
    return min(int(text), MAX_TAGS_PER_PAGE)


def _next_link(path: str, query: dict[str, str]) -> str:
    return f'<{path}?{urlencode(query)}>; rel="next"'


def _json_response(body: object, media_type: str, headers: dict[str, str]) -> Response:
    return Response(json.dumps(body), headers=headers, media_type=media_type)


def make_oci_routes(registry: Registry) -> list[BaseRoute]:
    """Return all routes; uploads before blobs, whose pattern matches them too."""
    return [
        Route("/v2/", _check_api_version, methods=["GET"]),
        Route("/v2", _check_api_version, methods=["GET"]),
        *upload_routes.make_upload_routes(registry),
        *blobs.make_blob_routes(registry),
        *make_manifest_routes(registry),
        *make_listing_routes(registry),
        *make_token_routes(registry),
    ]


async def _check_api_version(request: Request) -> Response:
    """Answer that this is a registry; a 401 tells anonymous clients to log in."""
    if current_identity(request).user_id is None:
        raise UnauthenticatedError("log in first", hint="make a token with `expertctl token new`")
    return JSONResponse({}, headers={"Docker-Distribution-Api-Version": "registry/2.0"})


def make_token_routes(registry: Registry) -> list[BaseRoute]:
    """Return the route of the token endpoint."""
    key = SessionKey.derive(registry.index_key)

    async def token(request: Request) -> Response:
        identity = current_identity(request)
        asked = parse_requested_scopes(request.query_params.getlist("scope"))
        granted = await to_thread.run_sync(_grant_scopes, registry, identity, asked)
        return _token_response(key.issue(identity, granted))

    return [Route("/token", token, methods=["GET"])]


def _grant_scopes(
    registry: Registry, identity: Identity, requested: list[TokenScope]
) -> list[TokenScope]:
    """Return the permitted scopes; the protocol requires that others are omitted silently."""
    with registry.database.read() as connection:
        return [scope for scope in requested if _is_granted(connection, identity, scope)]


def _is_granted(connection: Connection, identity: Identity, scope: TokenScope) -> bool:
    assert scope.namespace is not None
    try:
        rights.authorise(connection, identity, scope.action, scope.namespace, scope.package)
    except (UnauthenticatedError, ForbiddenError, NotFoundError):
        return False
    return True


def _token_response(secret: str) -> Response:
    now = datetime.now(UTC).replace(microsecond=0, tzinfo=None).isoformat()
    body = {
        "token": secret,
        "access_token": secret,
        "expires_in": SESSION_SECONDS,
        "issued_at": f"{now}Z",
    }
    return JSONResponse(body, headers={"Cache-Control": "no-store"})
