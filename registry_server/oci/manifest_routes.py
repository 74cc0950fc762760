"""``/v2/<name>/manifests/<reference>``: manifests by tag and digest.

In a namespace of packages a PUT of a tag is the publish, and nothing else writes there.
"""

from contextlib import suppress

from anyio import to_thread
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import DiskFullError, StoreError, TooLargeError
from registry_server.access import audit, quota
from registry_server.access.identity import Action, Identity
from registry_server.oci import manifests, repositories, tags
from registry_server.oci.access import Target, authorise
from registry_server.oci.blob_routes import immutable, knows
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.manifest_document import read_document
from registry_server.oci.manifests import StoredManifest
from registry_server.oci.names import RepositoryName, read_reference, read_tag
from registry_server.oci.requests import asker, repository_name
from registry_server.oci.upload_body import declared_length
from registry_server.oci.uploads import demand_disk
from registry_server.publishing.commit import publish
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest

MAX_TAGS = 64
"""How many ``tag`` parameters one PUT may have."""


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the address of manifests."""
    requests = _ManifestRequests(registry)
    address = "/v2/{name:path}/manifests/{reference}"
    return [
        Route(address, requests.get, methods=["GET"]),
        Route(address, requests.put, methods=["PUT"]),
        Route(address, requests.remove, methods=["DELETE"]),
    ]


class _ManifestRequests:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, request: Request) -> Response:
        """GET or HEAD: short reads, cheaper here than handing them to a thread."""
        name = repository_name(request)
        with self._registry.database.read() as connection:
            target = authorise(connection, asker(request), Action.READ, name)
            reference = _existing(request)
            found = manifests.look_up(connection, str(name), reference)
        if found is None:
            raise OciError(OciCode.MANIFEST_UNKNOWN, f"{name} has no manifest {reference}")
        by_digest = isinstance(reference, BlobDigest)
        headers = _headers(found, immutable(target) if by_digest else "private, no-cache")
        if knows(request, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        later = self._counted(name, found) if request.method == "GET" else None
        return Response(
            found.content, headers=headers, media_type=found.media_type, background=later
        )

    async def put(self, request: Request) -> Response:
        """PUT: keep a manifest and point tags to it, or publish a version."""
        name, reference = repository_name(request), read_reference(_reference(request))
        identity = asker(request)
        target = await to_thread.run_sync(self._pushing, identity, name)
        if target.for_packages:
            tag = _version_tag(target, reference, request)
            return await self._publish(identity, name, tag, await self._body(request))
        named = [read_tag(tag) for tag in request.query_params.getlist("tag")]
        if len(named) > MAX_TAGS:
            raise OciError(OciCode.TAG_INVALID, f"more than {MAX_TAGS} tags at once")
        content, kind = await self._body(request), request.headers.get("content-type")
        return await to_thread.run_sync(
            self._store, identity, name, reference, content, kind, named
        )

    async def remove(self, request: Request) -> Response:
        """DELETE: a tag alone, or a manifest with all tags that point to it."""
        await to_thread.run_sync(self._remove, request)
        return Response(status_code=202)

    def _pushing(self, identity: Identity, name: RepositoryName) -> Target:
        settings = self._registry.settings
        demand_disk(settings.data, settings.limits.manifest_bytes, floor=settings.limits.free_bytes)
        with self._registry.database.read() as connection:
            return authorise(connection, identity, Action.PUSH, name)

    async def _publish(
        self, identity: Identity, name: RepositoryName, tag: str, content: bytes
    ) -> Response:
        def run() -> BlobDigest:
            done = publish(self._registry, identity, name=name.package(), tag=tag, manifest=content)
            return BlobDigest.parse(str(done.package_digest))

        digest = await to_thread.run_sync(run)
        return _stored(name, digest, {"OCI-Tag": tag})

    async def _body(self, request: Request) -> bytes:
        limit = self._registry.settings.limits.manifest_bytes
        error = TooLargeError(f"a manifest has at most {limit} bytes")
        length = declared_length(request)
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
        kind: str | None,
        named: list[str],
    ) -> Response:
        limits = self._registry.settings.limits
        digest = _digest_of(content, reference)
        media_type = kind.partition(";")[0].strip() if kind else None
        document = read_document(content, media_type=media_type, max_bytes=limits.manifest_bytes)
        all_tags = [*([reference] if isinstance(reference, str) else []), *named]
        with self._registry.database.write() as connection:
            target = authorise(connection, identity, Action.PUSH, name)
            target.demand_oci("storing manifests")
            repository = repositories.find_or_create(
                connection, name=str(name), namespace_id=target.namespace.id
            )
            manifests.demand_named(connection, repository.id, document)
            if manifests.find(connection, repository.id, str(digest)) is None:
                quota.demand_room(connection, target.namespace, len(content), limits)
            manifests.store(
                connection,
                repository_id=repository.id,
                digest=digest,
                document=document,
                content=content,
            )
            for tag in all_tags:
                tags.point(connection, repository_id=repository.id, tag=tag, digest=str(digest))
            pushed = f"{name}@{digest}"
            audit.record(connection, identity, "manifest.push", pushed, " ".join(all_tags))
        subject = {"OCI-Subject": str(document.subject)} if document.subject else {}
        response = _stored(name, digest, subject)
        for tag in all_tags:
            response.headers.append("OCI-Tag", tag)
        return response

    def _remove(self, request: Request) -> None:
        name = repository_name(request)
        with self._registry.database.write() as connection:
            target = authorise(connection, asker(request), Action.DELETE, name)
            target.demand_oci("removing manifests")
            reference = _existing(request)
            repository = repositories.find(connection, str(name))
            remove = manifests.remove if isinstance(reference, BlobDigest) else tags.remove
            if repository is None or not remove(connection, repository.id, str(reference)):
                raise OciError(OciCode.MANIFEST_UNKNOWN, f"{name} has no manifest {reference}")
            by_digest = isinstance(reference, BlobDigest)
            action, removed = (
                ("manifest", f"@{reference}") if by_digest else ("tag", f":{reference}")
            )
            audit.record(connection, asker(request), f"{action}.remove", f"{name}{removed}")

    def _counted(self, name: RepositoryName, found: StoredManifest) -> BackgroundTask | None:
        """Count a fetch; return what is left to do once the answer is sent, if anything.

        What cannot be written stays counted, and reading goes on.
        """
        downloads = self._registry.downloads
        if not downloads.count(str(name), found.digest):
            return None

        def write() -> None:
            with suppress(StoreError, DiskFullError):
                downloads.flush(self._registry.database)

        return BackgroundTask(write)


def _existing(request: Request) -> BlobDigest | str:
    """Read the reference of a manifest that should be there.

    Raises:
        OciError: MANIFEST_UNKNOWN where it is none: nothing can be stored under it, and 404 is
            what the conformance tests of the specification expect.
    """
    try:
        return read_reference(_reference(request))
    except OciError as error:
        raise OciError(OciCode.MANIFEST_UNKNOWN, error.message) from error


def _reference(request: Request) -> str:
    text: str = request.path_params["reference"]
    return text


def _version_tag(target: Target, reference: BlobDigest | str, request: Request) -> str:
    if isinstance(reference, BlobDigest) or "tag" in request.query_params:
        target.demand_oci("storing manifests without a version")
    return str(reference)


def _digest_of(content: bytes, reference: BlobDigest | str) -> BlobDigest:
    if isinstance(reference, str):
        return BlobDigest.of(content)
    found = BlobDigest.of(content, algorithm=reference.algorithm)
    if found != reference:
        raise OciError(OciCode.DIGEST_INVALID, f"the manifest has the digest {found}")
    return found


def _headers(found: StoredManifest, cache: str) -> dict[str, str]:
    return {
        "Docker-Content-Digest": found.digest,
        "ETag": f'"{found.digest}"',
        "Cache-Control": cache,
        "Vary": "Authorization",
        "X-Content-Type-Options": "nosniff",
    }


def _stored(name: RepositoryName, digest: BlobDigest, headers: dict[str, str]) -> Response:
    location = f"/v2/{name}/manifests/{digest}"
    own = {"Location": location, "Docker-Content-Digest": str(digest)}
    return Response(status_code=201, headers={**own, **headers})
