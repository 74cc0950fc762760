"""`OciClient`: the OCI distribution interface of any registry: manifests and blobs.

A manifest requested by digest is returned only if it has that digest; one requested by tag only if
it has the digest that the registry names, if any.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from expertctl.errors import DigestError, NotFoundError, RegistryError
from expertctl.package.layout import INDEX_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES
from expertctl.reference import Digest, Progress, ignore_progress
from expertctl.registry.address import RegistryAddress
from expertctl.registry.errors import sanitise_text
from expertctl.registry.http import (
    RegistryHttp,
    RegistryRequest,
    RegistryResponse,
    StreamedResponse,
)
from expertctl.registry.upload import BlobUpload, Uploader

_MAX_ANSWER = 4 << 20
_DIGEST_HEADER = "docker-content-digest"
_TYPES = f"{MANIFEST_TYPE}, {INDEX_TYPE}"
_REPOSITORY = re.compile(
    r"(?=.{1,255}\Z)[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """A manifest of a registry; ``digest`` is that of ``data``."""

    digest: Digest
    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class OciClient:
    """A client of one registry; repositories are named ``namespace/name``."""

    http: RegistryHttp
    address: RegistryAddress
    uploads: Path | None = field(default=None)
    """Where interrupted uploads are stored; None: another process starts over."""

    def ping(self) -> None:
        """Check that there is a registry, and that it accepts the login.

        Raises:
            UnauthenticatedError: when it requires a login, or another one.
        """
        self.http.request(RegistryRequest("GET", self.address, "/v2/"), max_bytes=_MAX_ANSWER)

    def fetch_manifest(
        self, repository: str, reference: str | Digest, *, max_bytes: int = MAX_MANIFEST_BYTES
    ) -> RemoteManifest:
        """Return a manifest by tag or digest.

        Raises:
            NotFoundError: when there is none.
            DigestError: when the bytes are not those of the digest.
        """
        call = self._make_request("GET", repository, _manifest_path(reference), {"Accept": _TYPES})
        answer = self.http.request(call, max_bytes=max_bytes)
        digest = Digest.compute(answer.body)
        self._check_digest(answer, digest, reference, repository)
        return RemoteManifest(digest, answer.body, answer.headers.get("content-type", ""))

    def fetch_manifest_digest(self, repository: str, tag: str) -> Digest | None:
        """Return the digest that a registry states for a tag; None where there is no such tag.

        Raises:
            RegistryError: when it does not say so.
        """
        call = self._make_request("HEAD", repository, _manifest_path(tag), {"Accept": _TYPES})
        try:
            answer = self.http.request(call, max_bytes=0)
        except NotFoundError:
            return None
        return self._header_digest(answer, repository)

    def put_manifest(
        self,
        repository: str,
        reference: str | Digest,
        data: bytes,
        *,
        media_type: str = MANIFEST_TYPE,
    ) -> Digest:
        """Store a manifest under a tag or its digest.

        Raises:
            ConflictError: when the tag is taken.
        """
        headers = {"Content-Type": media_type}
        call = self._make_request("PUT", repository, _manifest_path(reference), headers)
        call = replace(call, body=data, scope=_token_scope(repository, "pull,push"))
        self.http.request(call, max_bytes=_MAX_ANSWER, accept={201})
        return Digest.compute(data)

    def has_blob(self, repository: str, digest: Digest) -> bool:
        """Tell whether a repository has a blob."""
        try:
            call = self._make_request("HEAD", repository, f"blobs/{digest}")
            self.http.request(call, max_bytes=0)
        except NotFoundError:
            return False
        return True

    @contextmanager
    def open_blob(
        self, repository: str, digest: Digest, *, headers: Mapping[str, str] | None = None
    ) -> Iterator[StreamedResponse]:
        """Request a blob, or with a ``Range`` header the rest of it; the bytes are not checked.

        Raises:
            NotFoundError: when it is not there.
        """
        call = self._make_request("GET", repository, f"blobs/{digest}", headers)
        with self.http.open_stream(call, accept={200, 206, 416}) as answer:
            yield answer

    def upload_blob(
        self,
        repository: str,
        digest: Digest,
        size: int,
        open_blob: Callable[[], AbstractContextManager[BinaryIO]],
        *,
        mount_from: str | None = None,
        progress: Progress = ignore_progress,
    ) -> bool:
        """Upload a blob unless the registry has it; tell whether its bytes were sent.

        Raises:
            DigestError: when the bytes are not those of the digest.
        """
        if self.has_blob(repository, digest):
            progress(size)
            return False
        scope = _token_scope(repository, "pull,push")
        if mount_from is not None:
            scope += " " + _token_scope(mount_from, "pull")
        target = BlobUpload(
            _repository_path(repository, "blobs/uploads/"), scope, digest, size, mount_from
        )
        uploader = Uploader(self.http, self.address, self.uploads)
        return uploader.send(target, open_blob, progress=progress)

    def _make_request(
        self, method: str, repository: str, rest: str, headers: Mapping[str, str] | None = None
    ) -> RegistryRequest:
        target, scope = _repository_path(repository, rest), _token_scope(repository, "pull")
        return RegistryRequest(method, self.address, target, headers=headers or {}, scope=scope)

    def _check_digest(
        self, answer: RegistryResponse, digest: Digest, reference: str | Digest, repository: str
    ) -> None:
        if isinstance(reference, Digest):
            expected: Digest | None = reference
        else:
            named = _DIGEST_HEADER in answer.headers
            expected = self._header_digest(answer, repository) if named else None
        if expected not in {None, digest}:
            message = f"{self.address.host}: the manifest of {repository} is not {expected}"
            raise DigestError(message, hint="a proxy or the registry alters it")

    def _header_digest(self, answer: RegistryResponse, repository: str) -> Digest:
        text = answer.headers.get(_DIGEST_HEADER, "")
        try:
            return Digest.parse(text)
        except DigestError as error:
            fact = (
                f"{sanitise_text(text, 80)!r} is no sha256 digest" if text else "it names no digest"
            )
            raise RegistryError(f"{self.address.host}: {repository}: {fact}") from error


def _repository_path(repository: str, rest: str) -> str:
    if not _REPOSITORY.fullmatch(repository):
        raise NotFoundError(f"{sanitise_text(repository, 80)!r} cannot be the name of a repository")
    return f"/v2/{repository}/{rest}"


def _manifest_path(reference: str | Digest) -> str:
    if isinstance(reference, str) and not _TAG.fullmatch(reference):
        raise NotFoundError(f"{sanitise_text(reference, 80)!r} cannot be a tag")
    return f"manifests/{quote(str(reference), safe=':')}"


def _token_scope(repository: str, actions: str) -> str:
    return f"repository:{repository}:{actions}"
