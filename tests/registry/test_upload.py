"""Uploads to registries that break off, refuse chunks or send the bytes elsewhere: attack 91."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from expertctl.digest import Digest
from expertctl.errors import (
    BudgetError,
    DigestError,
    ForbiddenError,
    RegistryError,
    UnreachableError,
)
from expertctl.registry.upload import BlobUpload, Uploader, remove_old_files
from tests.registry.hostile_registry import (
    HostileServer,
    ReceivedRequest,
    RecordedPauses,
    Reply,
    ReplyScript,
    Serve,
    StallMarker,
    make_client,
    make_reply,
    serve,
)

__all__ = ["serve"]

DATA = bytes(range(256)) * 10
DIGEST = Digest.compute(DATA)
CHUNK = 1000
UPLOADS = "/v2/acme/sql/blobs/uploads/"


@dataclass
class UploadScript:
    """What a good registry does with uploads."""

    sessions: dict[str, bytearray] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def __call__(self, request: ReceivedRequest) -> Reply:
        match request.method:
            case "HEAD":
                return make_reply(200 if request.path.rpartition("/")[2] in self.blobs else 404)
            case "POST":
                path = f"{UPLOADS}{len(self.sessions)}"
                self.sessions[path] = bytearray()
                return make_reply(202, Location=path + "?state=1", **self.headers)
        held = self.sessions.get(request.path)
        if held is None:
            return make_reply(404)
        match request.method:
            case "GET":
                return self._state(204, request, held)
            case "PATCH":
                return self._patch(request, held)
            case _:
                return self._put(request, held)

    def _state(self, status: int, request: ReceivedRequest, held: bytearray) -> bytes:
        end = max(len(held) - 1, 0)
        return make_reply(status, Location=request.path + "?state=2", Range=f"0-{end}")

    def _patch(self, request: ReceivedRequest, held: bytearray) -> bytes:
        start = int(request.headers["content-range"].partition("-")[0])
        if start != len(held):
            return make_reply(416)
        held += request.body
        return self._state(202, request, held)

    def _put(self, request: ReceivedRequest, held: bytearray) -> bytes:
        data = bytes(held) + request.body
        wanted = request.target.partition("digest=")[2].replace("%3A", ":")
        if str(Digest.compute(data)) != wanted:
            return make_reply(400, b'{"errors": [{"code": "DIGEST_INVALID", "message": "other"}]}')
        del self.sessions[request.path]
        self.blobs[wanted] = data
        return make_reply(201)


@dataclass
class BlobSender:
    """Sends DATA to a server."""

    server: HostileServer
    folder: Path | None = None
    chunk: int = CHUNK
    attempts: int = 3
    counts: list[int] = field(default_factory=list)
    pauses: RecordedPauses = field(default_factory=RecordedPauses)

    def send(
        self,
        data: bytes = DATA,
        *,
        digest: Digest = DIGEST,
        size: int | None = None,
    ) -> None:
        @contextmanager
        def opened() -> Iterator[BinaryIO]:
            yield BytesIO(data)

        upload = BlobUpload(UPLOADS, "repository:acme/sql:pull,push", digest, size or len(data))
        with make_client(
            self.server, attempts=self.attempts, pauses=self.pauses, secret="xpt_1"
        ) as http:
            uploader = Uploader(http, self.server.address, self.folder, self.chunk)
            uploader.send(upload, opened, progress=self.counts.append)

    def methods(self) -> list[str]:
        return [request.method for request in self.server.requests]


def lying(
    upload_script: UploadScript, lie: Callable[[ReceivedRequest], Reply | None]
) -> ReplyScript:
    def script(request: ReceivedRequest) -> Reply:
        said = lie(request)
        return upload_script(request) if said is None else said

    return script


def once(
    method: str, answer: Callable[[ReceivedRequest], Reply]
) -> Callable[[ReceivedRequest], Reply | None]:
    """Lie to the first request of a method."""
    left = [method]

    def lie(request: ReceivedRequest) -> Reply | None:
        if left and request.method == left[0]:
            left.clear()
            return answer(request)
        return None

    return lie


def test_a_small_blob_goes_in_one_piece(serve: Serve) -> None:
    upload_script = UploadScript()
    sender = BlobSender(serve(upload_script), chunk=len(DATA))
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert sender.methods() == ["POST", "PUT"]
    assert sum(sender.counts) == len(DATA)


def test_an_empty_blob_goes_too(serve: Serve) -> None:
    upload_script = UploadScript()
    BlobSender(serve(upload_script)).send(b"", digest=Digest.compute(b""))
    assert upload_script.blobs == {str(Digest.compute(b"")): b""}


def test_a_large_blob_goes_in_chunks_one_after_another(serve: Serve) -> None:
    upload_script = UploadScript()
    sender = BlobSender(serve(upload_script))
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    ranges = [r.headers["content-range"] for r in sender.server.requests if r.method == "PATCH"]
    assert ranges == ["0-999", "1000-1999", "2000-2559"]
    assert sum(sender.counts) == len(DATA)


def test_chunks_are_as_long_as_the_registry_demands(serve: Serve) -> None:
    upload_script = UploadScript(headers={"OCI_Chunk_Min_Length": "2000"})
    sender = BlobSender(serve(upload_script))
    sender.send()
    ranges = [r.headers["content-range"] for r in sender.server.requests if r.method == "PATCH"]
    assert ranges == ["0-1999", "2000-2559"]


def test_chunks_of_absurd_length_are_refused(serve: Serve) -> None:
    sender = BlobSender(serve(UploadScript(headers={"OCI_Chunk_Min_Length": "999999999999"})))
    with pytest.raises(RegistryError, match="it requires chunks of"):
        sender.send()


@pytest.mark.parametrize("kept", [0, 1, 500, 1000])
def test_a_broken_chunk_goes_on_where_the_registry_says(serve: Serve, kept: int) -> None:
    upload_script = UploadScript()

    def lie(request: ReceivedRequest) -> Reply | None:
        if request.headers.get("content-range", "").startswith("1000-") and not broken:
            broken.append(request)
            upload_script.sessions[request.path] += request.body[:kept]
            return b""
        return None

    broken: list[ReceivedRequest] = []
    sender = BlobSender(serve(lying(upload_script, lie)))
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert sum(sender.counts) == len(DATA)
    assert sender.pauses.seconds == [0.5]


def test_a_registry_that_never_takes_the_chunk_is_given_up(serve: Serve) -> None:
    upload_script = UploadScript()
    sender = BlobSender(serve(lying(upload_script, lambda r: b"" if r.method == "PATCH" else None)))
    with pytest.raises(UnreachableError, match="tried 3 times"):
        sender.send()


def test_a_session_that_is_gone_begins_anew(serve: Serve) -> None:
    upload_script = UploadScript()

    def forget(request: ReceivedRequest) -> Reply:
        upload_script.sessions.clear()
        upload_script.sessions["/used"] = bytearray()
        return b""

    sender = BlobSender(serve(lying(upload_script, once("PATCH", forget))))
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}


def test_a_registry_that_had_more_than_we_thought_is_believed(serve: Serve) -> None:
    upload_script = UploadScript()

    def lie(request: ReceivedRequest) -> Reply:
        upload_script.sessions[request.path] += request.body
        return make_reply(416)

    sender = BlobSender(serve(lying(upload_script, once("PATCH", lie))))
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}


def test_a_registry_that_refuses_what_it_asked_for_is_named(serve: Serve) -> None:
    sender = BlobSender(
        serve(lying(UploadScript(), lambda r: make_reply(416) if r.method == "PATCH" else None))
    )
    with pytest.raises(RegistryError, match="refuses the chunk that it asked for"):
        sender.send()


@pytest.mark.parametrize("text", ["0-5000", "0-0"])
def test_an_offset_that_cannot_be_is_refused(serve: Serve, text: str) -> None:
    def lie(request: ReceivedRequest) -> Reply | None:
        if request.method != "PATCH":
            return None
        start = request.headers["content-range"]
        if text == "0-0" and start.startswith("0-"):
            return None
        return make_reply(202, Location=request.path, Range=text)

    with pytest.raises(RegistryError, match="it reports"):
        BlobSender(serve(lying(UploadScript(), lie))).send()


def test_a_state_beyond_the_end_is_refused(serve: Serve) -> None:
    def lie(request: ReceivedRequest) -> Reply | None:
        if request.method == "PATCH":
            return b""
        if request.method == "GET":
            return make_reply(204, Location=request.path, Range="0-99999")
        return None

    with pytest.raises(RegistryError, match="more bytes than were sent"):
        BlobSender(serve(lying(UploadScript(), lie))).send()


@pytest.mark.parametrize("status", [404, 405, 501])
def test_without_chunks_it_goes_in_one_piece(serve: Serve, status: int) -> None:
    upload_script = UploadScript()
    refuses = serve(
        lying(upload_script, lambda r: make_reply(status) if r.method == "PATCH" else None)
    )
    sender = BlobSender(refuses)
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert sum(sender.counts) == len(DATA)


# attack 91


@pytest.mark.parametrize(
    "location",
    ["{thief}/v2/x", "//localhost:1/x", "http://169.254.169.254/x", "", "file:///etc/passwd",
     "http://me:pw@{host}/x", "http://[::/x"],
)  # fmt: skip
def test_an_upload_that_shall_go_on_elsewhere_is_refused(serve: Serve, location: str) -> None:
    thief = serve(make_reply(201))

    def lie(request: ReceivedRequest) -> Reply:
        place = location.format(thief=thief.alias_url, host=request.headers["host"])
        return make_reply(202, Location=place)

    sender = BlobSender(serve(lying(UploadScript(), once("POST", lie))))
    with pytest.raises(RegistryError, match="which is not this registry") as caught:
        sender.send()
    assert "nothing was sent there" in caught.value.hint
    assert thief.requests == []


def test_a_chunk_that_shall_go_on_elsewhere_is_refused(serve: Serve) -> None:
    thief = serve(make_reply(201))

    def lie(_: ReceivedRequest) -> Reply:
        return make_reply(202, Location=thief.alias_url, Range="0-999")

    with pytest.raises(RegistryError, match="which is not this registry"):
        BlobSender(serve(lying(UploadScript(), once("PATCH", lie)))).send()
    assert thief.requests == []


def test_a_whole_address_of_the_same_registry_is_fine(serve: Serve) -> None:
    upload_script = UploadScript()

    def lie(request: ReceivedRequest) -> Reply:
        upload_script(request)
        return make_reply(202, Location=f"http://{request.headers['host']}{UPLOADS}0")

    BlobSender(serve(lying(upload_script, once("POST", lie)))).send()
    assert upload_script.blobs == {str(DIGEST): DATA}


# what is sent


def test_other_bytes_than_their_digest_are_never_finished(serve: Serve) -> None:
    upload_script = UploadScript()
    sender = BlobSender(serve(upload_script))
    with pytest.raises(DigestError, match="has another digest"):
        sender.send(DATA[:-1] + b"\0")
    assert "PUT" not in sender.methods()
    small = BlobSender(serve(upload_script), chunk=10**6)
    with pytest.raises(DigestError, match="has another digest"):
        small.send(DATA[:-1] + b"\0")
    assert upload_script.blobs == {}


def test_a_registry_that_wrongly_finds_another_digest_is_blamed(serve: Serve) -> None:
    sender = BlobSender(
        serve(lying(UploadScript(), lambda r: make_reply(400) if r.method == "PUT" else None)),
        chunk=10**6,
    )
    with pytest.raises(RegistryError, match="the request is refused"):
        sender.send()


def test_a_file_that_has_become_shorter_is_named(serve: Serve) -> None:
    with pytest.raises(DigestError, match="shorter"):
        BlobSender(serve(UploadScript())).send(DATA[:1500], size=len(DATA))


@pytest.mark.parametrize(
    ("status", "kind"), [(403, ForbiddenError), (413, BudgetError), (503, UnreachableError)]
)
def test_a_refusal_keeps_its_kind(serve: Serve, status: int, kind: type[RegistryError]) -> None:
    with pytest.raises(kind):
        BlobSender(serve(make_reply(status))).send()


def test_a_broken_piece_is_sent_again_in_a_new_session(serve: Serve) -> None:
    upload_script = UploadScript()

    def break_off(request: ReceivedRequest) -> Reply:
        upload_script.sessions[request.path] += request.body[
            :100
        ]  # a registry that keeps what came
        return b""

    sender = BlobSender(serve(lying(upload_script, once("PUT", break_off))), chunk=10**6)
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert sender.methods() == ["POST", "PUT", "POST", "PUT"]
    assert sum(sender.counts) == len(DATA)


@pytest.mark.parametrize("chunk", [CHUNK, 10**6])
def test_a_lost_answer_to_the_last_request_is_no_failure(serve: Serve, chunk: int) -> None:
    upload_script = UploadScript()

    def lose(request: ReceivedRequest) -> Reply:
        upload_script(request)
        return b""

    sender = BlobSender(serve(lying(upload_script, once("PUT", lose))), chunk=chunk)
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}


def test_a_finish_that_is_not_found_and_not_there_is_a_failure(serve: Serve) -> None:
    def lie(request: ReceivedRequest) -> Reply | None:
        return make_reply(404) if request.method == "PUT" else None

    with pytest.raises(Exception, match="not found"):
        BlobSender(serve(lying(UploadScript(), lie))).send()


# another process


def test_what_broke_off_goes_on_in_another_run(serve: Serve, tmp_path: Path) -> None:
    upload_script = UploadScript()
    closed: list[int] = []

    def lie(request: ReceivedRequest) -> Reply | None:
        if request.headers.get("content-range", "").startswith("1000-") and not closed:
            return b""
        return None

    server = serve(lying(upload_script, lie))
    with pytest.raises(UnreachableError):
        BlobSender(server, tmp_path / "uploads").send()
    [state] = (tmp_path / "uploads").iterdir()
    assert state.stat().st_mode & 0o777 == 0o600
    closed.append(1)
    server.requests.clear()
    sender = BlobSender(server, tmp_path / "uploads")
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert sender.methods() == ["GET", "PATCH", "PATCH", "PUT"]
    assert list((tmp_path / "uploads").iterdir()) == []


def test_what_an_earlier_run_sent_wrongly_is_not_finished_but_forgotten(
    serve: Serve, tmp_path: Path
) -> None:
    upload_script = UploadScript()
    down = [True]

    def lie(request: ReceivedRequest) -> Reply | None:
        return b"" if down and upload_script.sessions.get(request.path) else None

    server = serve(lying(upload_script, lie))
    with pytest.raises(UnreachableError):
        BlobSender(server, tmp_path).send(b"\xff" + DATA[1:])
    down.clear()
    with pytest.raises(RegistryError, match="the request is refused: other"):
        BlobSender(server, tmp_path).send()
    assert upload_script.blobs == {}
    BlobSender(server, tmp_path).send()
    assert upload_script.blobs == {str(DIGEST): DATA}


@pytest.mark.parametrize(
    "state",
    [b"", b"{", b'{"location": 1, "chunk": 1000}', b'{"location": "http://evil/", "chunk": 1000}',
     b'{"location": "/v2/gone", "chunk": 1000}', b'{"location": "/v2/x", "chunk": 0}'],
)  # fmt: skip
def test_a_memory_that_makes_no_sense_is_passed_over(
    serve: Serve, tmp_path: Path, state: bytes
) -> None:
    upload_script = UploadScript()
    server = serve(lying(upload_script, once("PATCH", lambda _: make_reply(403))))
    with pytest.raises(ForbiddenError):
        BlobSender(server, tmp_path).send()
    [path] = tmp_path.iterdir()
    path.write_bytes(state)
    BlobSender(server, tmp_path).send()
    assert upload_script.blobs == {str(DIGEST): DATA}


def test_old_memories_are_swept(tmp_path: Path) -> None:
    remove_old_files(tmp_path / "missing", age=1.0)
    for name in ("old", "young"):
        (tmp_path / f"{name}.json").write_text("{}")
    os.utime(tmp_path / "old.json", (1000, 1000))
    remove_old_files(tmp_path, age=5000.0)
    assert [path.name for path in tmp_path.iterdir()] == ["young.json"]


PROGRAM = """
import sys
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import RegistryHttp
from expertctl.registry.upload import BlobUpload, Uploader
from tests.registry.test_upload import CHUNK, DATA, DIGEST, UPLOADS

url, folder = sys.argv[1:]
with RegistryHttp() as http:
    Uploader(http, RegistryAddress.parse(url), Path(folder), CHUNK).send(
        BlobUpload(UPLOADS, "", DIGEST, len(DATA)), lambda: nullcontext(BytesIO(DATA)),
        progress=lambda count: print(count, flush=True),
    )
"""


def test_a_killed_process_leaves_an_upload_that_another_finishes(
    serve: Serve, tmp_path: Path
) -> None:
    upload_script = UploadScript()
    stalled = threading.Event()

    def lie(request: ReceivedRequest) -> Reply | None:
        if request.headers.get("content-range", "").startswith("1000-") and not stalled.is_set():
            stalled.set()
            return [StallMarker()]
        return None

    server = serve(lying(upload_script, lie))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    sent = 0
    while sent < 2000:
        sent += int(process.stdout.readline())
    assert stalled.wait(60), "what was sent has to arrive before the sender dies"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    server.requests.clear()
    sender = BlobSender(server, tmp_path)
    sender.send()
    assert upload_script.blobs == {str(DIGEST): DATA}
    assert [r.headers.get("content-range") for r in server.requests] == [
        None, "1000-1999", "2000-2559", None,
    ]  # fmt: skip
