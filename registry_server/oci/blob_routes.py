"""``/v2/<name>/blobs/<digest>``: blobs as they are, whole or in part; and removing them."""

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import StoreError
from registry_server.access import audit
from registry_server.access.identity import Action
from registry_server.oci import blobs, repositories
from registry_server.oci.access import Target, authorise
from registry_server.oci.blob_response import BlobResponse
from registry_server.oci.byte_range import ByteRange, read_range
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.names import read_digest
from registry_server.oci.requests import asker, repository_name
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest

_SAFE = {
    "Content-Type": "application/octet-stream",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Accept-Ranges": "bytes",
}
"""Whatever a blob holds, no browser makes a page of it."""


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the address of blobs."""
    requests = _BlobRequests(registry)
    return [
        Route("/v2/{name:path}/blobs/{digest}", requests.get, methods=["GET"]),
        Route("/v2/{name:path}/blobs/{digest}", requests.remove, methods=["DELETE"]),
    ]


def immutable(target: Target) -> str:
    """Return how long others may keep what a digest names."""
    shared = "public" if target.namespace.read == "public" else "private"
    return f"{shared}, max-age=31536000, immutable"


def knows(request: Request, etag: str) -> bool:
    """Tell whether the client says that it has these bytes."""
    known = request.headers.get("if-none-match", "")
    return known == "*" or etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}


class _BlobRequests:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, request: Request) -> Response | BlobResponse:
        """GET or HEAD: two short reads, cheaper here than handing them to a thread."""
        name, digest = repository_name(request), read_digest(request.path_params["digest"])
        with self._registry.database.read() as connection:
            target = authorise(connection, asker(request), Action.READ, name)
            size = blobs.linked_size(connection, str(name), digest)
        if size is None:
            raise _unknown(digest)
        etag = f'"{digest}"'
        headers = {"ETag": etag, "Cache-Control": immutable(target), "Vary": "Authorization"}
        headers["Docker-Content-Digest"] = str(digest)
        if knows(request, etag):
            return Response(status_code=304, headers=headers)
        return self._answer(request, digest, size, headers)

    async def remove(self, request: Request) -> Response:
        """DELETE: take a blob from the repository; its bytes are collected later."""
        await to_thread.run_sync(self._remove, request)
        return Response(status_code=202)

    def _answer(
        self, request: Request, digest: BlobDigest, size: int, headers: dict[str, str]
    ) -> BlobResponse:
        if self._registry.storage.size(digest) != size:
            raise StoreError(f"blob {digest} is missing from the storage, or damaged")
        path = self._registry.storage.path(digest)
        return BlobResponse(
            path, size=size, part=_part(request, size), headers={**_SAFE, **headers}
        )

    def _remove(self, request: Request) -> None:
        name, digest = repository_name(request), read_digest(request.path_params["digest"])
        with self._registry.database.write() as connection:
            target = authorise(connection, asker(request), Action.DELETE, name)
            target.demand_oci("removing blobs")
            repository = repositories.find(connection, str(name))
            if repository is None or not blobs.unlink(connection, repository.id, digest):
                raise _unknown(digest)
            audit.record(connection, asker(request), "blob.remove", f"{name}@{digest}")


def _part(request: Request, size: int) -> ByteRange | None:
    condition = request.headers.get("if-range")
    etag = f'"{request.path_params["digest"]}"'
    if condition is not None and condition != etag:
        return None
    return read_range(request.headers.get("range"), size=size)


def _unknown(digest: BlobDigest) -> OciError:
    return OciError(OciCode.BLOB_UNKNOWN, f"blob {digest} is not in this repository")
