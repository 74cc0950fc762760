"""``/v2/<name>/blobs/uploads/``: blobs on their way in, whole, in chunks, or from next door."""

from anyio import CancelScope, to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from registry_server.access.identity import Identity
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.mounts import mount
from registry_server.oci.names import RepositoryName, read_digest
from registry_server.oci.requests import asker, repository_name
from registry_server.oci.upload_body import SMALL, declared_length, receive
from registry_server.oci.uploads import OpenUpload, Uploads, UploadState
from registry_server.registry import Registry
from registry_server.storage.blob_digest import ALGORITHMS, BlobDigest

_UPLOADS = "/v2/{name:path}/blobs/uploads"


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the addresses of uploads."""
    requests = _UploadRequests(registry)
    return [
        Route(f"{_UPLOADS}/", requests.start, methods=["POST"]),
        Route(_UPLOADS, requests.start, methods=["POST"]),
        Route(f"{_UPLOADS}/{{id}}", requests.state, methods=["GET"]),
        Route(f"{_UPLOADS}/{{id}}", requests.append, methods=["PATCH"]),
        Route(f"{_UPLOADS}/{{id}}", requests.finish, methods=["PUT"]),
        Route(f"{_UPLOADS}/{{id}}", requests.cancel, methods=["DELETE"]),
    ]


class _UploadRequests:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._uploads = Uploads(registry)

    async def start(self, request: Request) -> Response:
        """POST: mount a blob, take one whole, or begin an upload."""
        name, identity = repository_name(request), asker(request)
        asked = request.query_params
        if "mount" in asked:
            digest = read_digest(asked["mount"])
            source = asked.get("from")
            if await to_thread.run_sync(mount, self._registry, identity, name, digest, source):
                return created(name, digest)
        if "digest" in asked and "mount" not in asked:
            return await self._whole(request, identity, name, read_digest(asked["digest"]))
        algorithm = _algorithm(asked.get("digest-algorithm", "sha256"))
        upload = await to_thread.run_sync(self._uploads.start, identity, name, algorithm)
        await to_thread.run_sync(self._uploads.pause, upload)
        return _accepted(upload.state)

    async def state(self, request: Request) -> Response:
        """GET: how far an upload is."""
        name, identity = repository_name(request), asker(request)
        found = await to_thread.run_sync(self._uploads.state, identity, name, _id(request))
        return Response(status_code=204, headers=_headers(found))

    async def append(self, request: Request) -> Response:
        """PATCH: the next bytes."""
        upload = await self._open(request)
        try:
            await _as_oci_says(self._uploads, upload, request, unreserved=0)
        finally:
            await self._pause(upload)
        return _accepted(upload.state)

    async def finish(self, request: Request) -> Response:
        """PUT: the last bytes, or none, and the digest of all."""
        digest = read_digest(request.query_params.get("digest", ""))
        upload = await self._open(request)
        return await self._finish(request, upload, digest)

    async def cancel(self, request: Request) -> Response:
        """DELETE: give an upload up."""
        upload = await self._open(request)
        await to_thread.run_sync(self._uploads.remove, upload)
        return Response(status_code=204)

    async def _whole(
        self, request: Request, identity: Identity, name: RepositoryName, digest: BlobDigest
    ) -> Response:
        length = declared_length(request)
        small = length is not None and length <= SMALL
        begin = self._uploads.draft if small else self._uploads.start
        upload = await to_thread.run_sync(begin, identity, name, digest.algorithm)
        return await self._finish(request, upload, digest)

    async def _finish(self, request: Request, upload: OpenUpload, digest: BlobDigest) -> Response:
        try:
            await _as_oci_says(self._uploads, upload, request, unreserved=SMALL)
            await to_thread.run_sync(self._uploads.finish, asker(request), upload, digest)
        finally:
            await self._pause(upload)
        return created(upload.name, digest)

    async def _open(self, request: Request) -> OpenUpload:
        name, identity = repository_name(request), asker(request)
        return await to_thread.run_sync(self._uploads.open, identity, name, _id(request))

    async def _pause(self, upload: OpenUpload) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self._uploads.pause, upload)


def created(name: RepositoryName, digest: BlobDigest) -> Response:
    """Return the answer for a blob that is there now."""
    location = f"/v2/{name}/blobs/{digest}"
    headers = {"Location": location, "Docker-Content-Digest": str(digest)}
    return Response(status_code=201, headers=headers)


async def _as_oci_says(
    uploads: Uploads, upload: OpenUpload, request: Request, *, unreserved: int
) -> None:
    """Receive a body; a chunk out of order is answered with where the upload is."""
    try:
        await receive(uploads, upload, request, unreserved=unreserved)
    except OciError as error:
        if error.oci_code is OciCode.RANGE_INVALID:
            error.headers.update(_headers(upload.state))
        raise


def _id(request: Request) -> str:
    text: str = request.path_params["id"]
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")
    return text


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        known = " and ".join(ALGORITHMS)
        raise OciError(OciCode.DIGEST_INVALID, f"digests here are {known}, not {text[:40]!r}")
    return text


def _accepted(state: UploadState) -> Response:
    return Response(status_code=202, headers=_headers(state))


def _headers(state: UploadState) -> dict[str, str]:
    """Say where an upload is; ``0-0`` also stands for nothing, as every registry has it."""
    return {
        "Location": f"/v2/{state.name}/blobs/uploads/{state.id}",
        "Range": f"0-{max(0, state.offset - 1)}",
        "Docker-Upload-UUID": state.id,
        "Cache-Control": "no-store",
    }
