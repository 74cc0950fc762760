"""`Uploader`: sends blobs, small ones in one request, others in chunks that can be resumed.

Only the registry knows how far an upload is; a local file stores just its URL, so that another
process can ask. Bytes are sent to the registry itself: an upload that would continue on another
host is refused.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode, urljoin, urlsplit

from expertctl.digest import READ_CHUNK, Digest, Progress, ignore_progress
from expertctl.errors import (
    DigestError,
    ExpertError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    UnreachableError,
    sanitise_text,
)
from expertctl.files import make_folders, write_atomic
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import OpenChunks, RegistryHttp, RegistryRequest, RegistryResponse
from expertctl.schema.strict_json import encode_canonical, load_object

UPLOAD_CHUNK_BYTES = 16 << 20
"""The size of a chunk, which a broken connection can cost; also the limit for one request."""
MAX_CHUNK = 1 << 30
MAX_ANSWER = 1 << 20
MAX_STATE = 64 << 10
KEPT_SECONDS = 7 * 86400.0
"""How long an upload is remembered; registries forget them sooner."""
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,15})")

OpenBlob = Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class BlobUpload:
    """A blob to send to a registry."""

    path: str
    """Where uploads begin: ``/v2/<name>/blobs/uploads/``."""
    scope: str
    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class _UploadSession:
    """An upload that the registry has begun."""

    location: str
    offset: int = 0
    chunk: int = UPLOAD_CHUNK_BYTES


class _ChunksRefusedError(Exception):
    """The registry accepts no chunks."""


@dataclass(frozen=True, slots=True)
class Uploader:
    """Sends blobs to one registry."""

    http: RegistryHttp
    address: RegistryAddress
    folder: Path | None
    chunk_bytes: int = UPLOAD_CHUNK_BYTES

    def send(
        self, upload: BlobUpload, open_blob: OpenBlob, *, progress: Progress = ignore_progress
    ) -> None:
        """Send a blob.

        Raises:
            DigestError: when the bytes are not those of the digest.
            UnreachableError: when it makes no progress; the state is kept for the next attempt.
        """
        state = self._state_path(upload)
        if state is not None:
            remove_old_files(state.parent, age=KEPT_SECONDS)
        session = self._load_session(upload, state) or self._start(upload)
        with open_blob() as stream:
            self._transfer(_BlobSource(stream, upload, progress), session, state)
        if state is not None:
            state.unlink(missing_ok=True)

    def _transfer(self, source: "_BlobSource", session: _UploadSession, state: Path | None) -> None:
        if source.upload.size <= session.chunk and session.offset == 0:
            self._send_monolithic(source, session)
            return
        try:
            session = self._send_chunks(source, session, state)
        except _ChunksRefusedError:
            self._send_monolithic(source, self._start(source.upload))
            return
        self._finish_chunks(source, session, state)

    def _finish_chunks(
        self, source: "_BlobSource", session: _UploadSession, state: Path | None
    ) -> None:
        try:
            source.check_digest()
            self._finish(source.upload, session.location, None, repeatable=True)
        except (UnreachableError, RateLimitError):
            raise
        except ExpertError:
            if state is not None:  # other bytes than the blob arrived: start over next time
                state.unlink(missing_ok=True)
            raise

    def _start(self, upload: BlobUpload) -> _UploadSession:
        call = self._make_request(upload, "POST", upload.path, body=b"")
        answer = self.http.request(call, max_bytes=MAX_ANSWER, accept={201, 202}, repeatable=True)
        least = answer.headers.get("oci-chunk-min-length", "")
        wanted = int(least) if re.fullmatch(r"[0-9]{1,12}", least) else 0
        if wanted > MAX_CHUNK:
            raise RegistryError(f"{self.address.host}: it requires chunks of {wanted} bytes")
        return _UploadSession(self._parse_location(answer), 0, max(self.chunk_bytes, wanted))

    def _send_monolithic(self, source: "_BlobSource", session: _UploadSession) -> None:
        """Send all bytes in one request; each retry uses a new session."""
        upload = source.upload
        body = source.open_part(0, upload.size)
        sessions = iter([session])

        def attempt() -> None:
            fresh = next(sessions, None) or self._start(upload)
            self._finish(upload, fresh.location, body, repeatable=False)

        try:
            self.http.retries.run(attempt)
        except (UnreachableError, RateLimitError):
            raise
        except ExpertError:
            source.check_digest()  # rule out our own file before the registry is blamed
            raise

    def _send_chunks(
        self, source: "_BlobSource", session: _UploadSession, state: Path | None
    ) -> _UploadSession:
        failures = 0
        while session.offset < source.upload.size:
            self._save_session(state, session)
            source.report(session.offset)
            before = session.offset
            try:
                session = self._send_chunk(source, session)
                failures = 0
            except (UnreachableError, RateLimitError) as error:
                failures += 1
                self.http.retries.pause(failures, error)
                session = self._query_offset(source.upload, session)
                failures = 0 if session.offset > before else failures
        return session

    def _send_chunk(self, source: "_BlobSource", session: _UploadSession) -> _UploadSession:
        upload = source.upload
        start, end = session.offset, min(session.offset + session.chunk, upload.size)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - start),
            "Content-Range": f"{start}-{end - 1}",
        }
        call = RegistryRequest(
            "PATCH",
            self.address,
            session.location,
            headers=headers,
            body=source.open_part(start, end),
            scope=upload.scope,
        )
        answer = self.http.request(call, max_bytes=MAX_ANSWER, accept={202, 404, 405, 416, 501})
        if answer.status == 416:
            return self._resynchronise(upload, session)
        if answer.status != 202:
            raise _ChunksRefusedError
        offset = _parse_offset(answer, end)
        if not start < offset <= end:
            raise RegistryError(
                f"{self.address.host}: it reports {offset} bytes of a blob, {end} were sent"
            )
        return replace(session, location=self._parse_location(answer), offset=offset)

    def _resynchronise(self, upload: BlobUpload, session: _UploadSession) -> _UploadSession:
        """Continue at the registry's offset, which must differ from ours."""
        found = self._query_offset(upload, session)
        if found.offset == session.offset:
            raise RegistryError(f"{self.address.host}: it refuses the chunk that it asked for")
        return found

    def _query_offset(self, upload: BlobUpload, session: _UploadSession) -> _UploadSession:
        """Ask how many bytes have arrived."""
        call = self._make_request(upload, "GET", session.location)
        answer = self.http.request(call, max_bytes=MAX_ANSWER, accept={204, 404})
        if answer.status == 404:
            return self._start(upload)
        offset = _parse_offset(answer, 0)
        if offset > upload.size:
            raise RegistryError(f"{self.address.host}: it reports more bytes than were sent")
        return replace(session, location=self._parse_location(answer), offset=offset)

    def _finish(
        self, upload: BlobUpload, location: str, body: OpenChunks | None, *, repeatable: bool
    ) -> None:
        separator = "&" if "?" in location else "?"
        target = f"{location}{separator}{urlencode({'digest': str(upload.digest)})}"
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(upload.size if body else 0),
        }
        call = RegistryRequest(
            "PUT", self.address, target, headers=headers, body=body or b"", scope=upload.scope
        )
        try:
            self.http.request(call, max_bytes=MAX_ANSWER, accept={201}, repeatable=repeatable)
        except NotFoundError:
            if not self._has_arrived(upload):  # or the answer to an earlier attempt was lost
                raise

    def _has_arrived(self, upload: BlobUpload) -> bool:
        target = upload.path.removesuffix("uploads/") + str(upload.digest)
        call = self._make_request(upload, "HEAD", target)
        return self.http.request(call, max_bytes=0, accept={200, 404}).status == 200

    def _make_request(
        self, upload: BlobUpload, method: str, target: str, body: bytes | None = None
    ) -> RegistryRequest:
        return RegistryRequest(method, self.address, target, body=body, scope=upload.scope)

    def _parse_location(self, answer: RegistryResponse) -> str:
        """Return where an upload continues, which must be the same registry.

        Raises:
            RegistryError: when it is elsewhere, or nowhere.
        """
        text = answer.headers.get("location", "")
        try:
            target = urljoin(answer.url, text)
            parts = urlsplit(target)
            there = RegistryAddress.parse(f"{parts.scheme}://{parts.netloc}", allow_http=True)
        except (ValueError, ExpertError) as error:
            raise self._foreign_location_error(text) from error
        if not text or there != self.address:
            raise self._foreign_location_error(text)
        return target.removeprefix(self.address.url)

    def _foreign_location_error(self, text: str) -> RegistryError:
        return RegistryError(
            f"{self.address.host}: the upload would continue at "
            f"{sanitise_text(text.partition('?')[0], 200)!r}, which is not this registry",
            hint="nothing was sent there; a registry behind a proxy must know its public address",
        )

    def _state_path(self, upload: BlobUpload) -> Path | None:
        if self.folder is None or upload.size <= self.chunk_bytes:
            return None
        name = hashlib.sha256(
            f"{self.address.url}{upload.path}{upload.digest}".encode()
        ).hexdigest()
        return self.folder / f"{name}.json"

    def _save_session(self, state: Path | None, session: _UploadSession) -> None:
        if state is not None:
            make_folders(state.parent, mode=0o700)
            document = {"location": session.location, "chunk": session.chunk}
            write_atomic(state, encode_canonical(document), mode=0o600)

    def _load_session(self, upload: BlobUpload, state: Path | None) -> _UploadSession | None:
        if state is None:
            return None
        try:
            document = load_object(state.read_bytes(), what="an upload", max_bytes=MAX_STATE)
        except (OSError, ExpertError):
            return None
        location, chunk = document.get("location"), document.get("chunk")
        if not isinstance(location, str) or not location.startswith("/v2/"):
            return None
        if not isinstance(chunk, int) or not 0 < chunk <= MAX_CHUNK:
            return None
        with suppress(NotFoundError):
            return self._query_offset(upload, _UploadSession(location, 0, chunk))
        return None


def remove_old_files(folder: Path, *, age: float) -> None:
    """Remove the files of a folder that were not written for ``age`` seconds."""
    now = time.time()
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if abs(now - path.stat().st_mtime) >= age:
                path.unlink()


class _BlobSource:
    """The bytes of a blob, each hashed and reported once, however often it is sent."""

    def __init__(self, stream: BinaryIO, upload: BlobUpload, progress: Progress) -> None:
        self.upload = upload
        self._stream, self._progress = stream, progress
        self._reported, self._hashed = 0, 0
        self._hasher = hashlib.sha256()

    def report(self, position: int) -> None:
        """Report the position in the blob."""
        if position != self._reported:
            self._progress(position - self._reported)
            self._reported = position

    def open_part(self, start: int, end: int) -> OpenChunks:
        """Return a function that reads a part, as often as it is sent.

        Raises:
            DigestError: when the file has become shorter.
        """
        return lambda: self._iter_part(start, end)

    def check_digest(self) -> None:
        """Check all bytes, those sent by an earlier process included.

        Raises:
            DigestError: when they are not those of the digest.
        """
        self._hash_to(self.upload.size)
        if self._hasher.hexdigest() != self.upload.digest.hex:
            raise DigestError(f"the data for {self.upload.digest} has another digest")

    def _iter_part(self, start: int, end: int) -> Iterator[bytes]:
        position = start
        self._stream.seek(start)
        while position < end:
            data = self._stream.read(min(READ_CHUNK, end - position))
            if not data:
                raise DigestError(f"{self.upload.digest}: the file has become shorter")
            if position == self._hashed:
                self._hasher.update(data)
                self._hashed += len(data)
            position += len(data)
            yield data
            self.report(position)

    def _hash_to(self, end: int) -> None:
        self._stream.seek(self._hashed, os.SEEK_SET)
        while self._hashed < end and (
            data := self._stream.read(min(READ_CHUNK, end - self._hashed))
        ):
            self._hasher.update(data)
            self._hashed += len(data)


def _parse_offset(answer: RegistryResponse, default: int) -> int:
    """Return how many bytes a registry has, by its ``Range: 0-<last>``."""
    text = answer.headers.get("range", "")
    match = _RANGE.fullmatch(text)
    if match is None:
        return default
    return 0 if match[1] == "0" and not default else int(match[1]) + 1
