"""Downloads from a registry that lies or breaks off: attack 93, and what is kept for next time."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.errors import (
    DigestError,
    DiskFullError,
    ExpertError,
    NotFoundError,
    RegistryError,
    UnreachableError,
)
from expertctl.files import make_folders
from expertctl.registry.client import OciClient
from expertctl.registry.download import BLOB_MODE, KEPT_SECONDS, BlobDownloader, BlobRequest
from expertctl.registry.http import RegistryHttp
from tests.registry.hostile_registry import (
    SECONDS,
    HostileServer,
    ReceivedRequest,
    Reply,
    ReplyScript,
    Serve,
    StallMarker,
    make_client,
    make_reply,
    run_hostile_server,
    serve,
)

__all__ = ["serve"]

DATA = bytes(range(256)) * 40
DIGEST = Digest.compute(DATA)
FILE = FileDigest("weights.safetensors", len(DATA), DIGEST)


@dataclass(frozen=True)
class StagingTarget:
    """Stands for the store's staging."""

    folder: Path

    def path(self, digest: Digest) -> Path:
        return self.folder / digest.hex


def download(
    downloads: BlobDownloader,
    oci: OciClient,
    files: Iterable[FileDigest],
    target: StagingTarget,
    progress: Progress = ignore_progress,
) -> None:
    """Fetch blobs of acme/sql."""
    downloads.fetch_all([BlobRequest(oci, "acme/sql", file) for file in files], target, progress)


@dataclass(frozen=True)
class Place:
    """Where a test downloads to."""

    downloads: BlobDownloader
    target: StagingTarget

    def fetch(
        self, server: HostileServer, *files: FileDigest, attempts: int = 3, checked: bool = True
    ) -> list[int]:
        """Fetch files; return the progress that was reported.

        Unless ``checked``, others may be writing to the folder.
        """
        counts: list[int] = []
        with make_client(server, attempts=attempts) as http:
            oci = OciClient(http, server.address)
            download(self.downloads, oci, files or [FILE], self.target, counts.append)
        if checked:
            self.downloads.check_integrity()
        return counts

    @property
    def kept(self) -> bytes | None:
        path = self.downloads.folder / f"{DIGEST.hex}.part"
        return path.read_bytes() if path.exists() else None

    @property
    def arrived(self) -> bytes:
        return self.target.path(DIGEST).read_bytes()

    def left(self) -> list[str]:
        return sorted(path.suffix for path in self.downloads.folder.iterdir())


def new_place(folder: Path) -> Place:
    target = folder / "staging"
    target.mkdir()
    return Place(BlobDownloader(folder / "partial", kept_bytes=0), StagingTarget(target))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return new_place(tmp_path)


def honest(request: ReceivedRequest, data: bytes = DATA, etag: str = '"1"') -> bytes:
    """What a good registry answers, ranges and If-Range included."""
    wanted = request.headers.get("range")
    if wanted is None or request.headers.get("if-range", etag) != etag:
        return make_reply(200, data, ETag=etag)
    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
    part = data[start:]
    content = f"bytes {start}-{len(data) - 1}/{len(data)}"
    return make_reply(206, part, ETag=etag, Content_Range=content)


def test_blobs_of_several_repositories_come_together(serve: Serve, place: Place) -> None:
    blobs = {Digest.compute(bytes([n]) * 9): bytes([n]) * 9 for n in range(3)}
    server = serve(lambda r: honest(r, blobs[Digest.parse(r.path.rpartition("/")[2])]))
    with make_client(server) as http:
        oci = OciClient(http, server.address)
        wanted = [
            BlobRequest(oci, f"acme/e{n}", FileDigest("f", 9, d)) for n, d in enumerate(blobs)
        ]
        place.downloads.fetch_all(wanted, place.target)
    assert {d: place.target.path(d).read_bytes() for d in blobs} == blobs
    paths = {request.path.split("/blobs/")[0] for request in server.requests}
    assert paths == {"/v2/acme/e0", "/v2/acme/e1", "/v2/acme/e2"}


def first_then(first: Reply, then: ReplyScript = honest) -> ReplyScript:
    answers = iter([first])
    return lambda request: next(answers, None) or then(request)


def broken_at(size: int, etag: str = '"1"') -> bytes:
    return make_reply(200, DATA[:size], length=len(DATA), ETag=etag)


def test_a_blob_arrives_whole_read_only_and_leaves_nothing_behind(
    serve: Serve, place: Place
) -> None:
    counts = place.fetch(serve(honest))
    assert place.arrived == DATA
    assert place.target.path(DIGEST).stat().st_mode & 0o777 == BLOB_MODE
    assert sum(counts) == len(DATA)
    assert place.left() == []


def test_an_empty_blob_arrives_too(serve: Serve, place: Place) -> None:
    nothing = FileDigest("empty", 0, Digest.compute(b""))
    place.fetch(serve(lambda r: honest(r, b"")), nothing)
    assert place.target.path(nothing.digest).read_bytes() == b""


def test_many_blobs_come_at_once_and_the_same_one_once(serve: Serve, place: Place) -> None:
    blobs = {Digest.compute(bytes([n]) * 3000): bytes([n]) * 3000 for n in range(12)}
    server = serve(lambda r: honest(r, blobs[Digest.parse(r.path.rpartition("/")[2])]))
    files = [FileDigest(f"f{n}", 3000, digest) for n, digest in enumerate([*blobs, *blobs])]
    place.fetch(server, *files)
    assert {d: place.target.path(d).read_bytes() for d in blobs} == blobs
    assert len(server.requests) == 12


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=4))
def test_wherever_the_connection_breaks_it_goes_on_there(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rest = iter(cuts)

    def script(request: ReceivedRequest) -> Reply:
        whole = honest(request)
        cut = next(rest, None)
        return whole if cut is None else whole[: whole.index(b"\r\n\r\n") + 4 + cut]

    place = new_place(tmp_path_factory.mktemp("cut"))
    with run_hostile_server(script) as server:
        counts = place.fetch(server, attempts=6)
    assert place.arrived == DATA
    assert sum(counts) == len(DATA)


def test_what_broke_off_goes_on_from_the_same_registry_with_a_range(
    serve: Serve, place: Place
) -> None:
    failing = [broken_at(4000), b"", b""]
    server = serve(lambda r: failing.pop(0) if failing else honest(r))
    with pytest.raises(UnreachableError, match="tried 3 times"):
        place.fetch(server)
    assert place.kept == DATA[:4000]
    server.requests.clear()
    counts = place.fetch(server)
    assert place.arrived == DATA
    assert sum(counts) == len(DATA)
    [request] = server.requests
    assert request.headers["range"] == "bytes=4000-"
    assert request.headers["if-range"] == '"1"'


def test_a_registry_that_sends_a_byte_a_connection_is_given_up(serve: Serve, place: Place) -> None:
    """What comes is kept, and is no progress for which to forget the failures before."""

    def script(request: ReceivedRequest) -> Reply:
        head, _, body = honest(request).partition(b"\r\n\r\n")
        return head + b"\r\n\r\n" + body[:1]

    server = serve(script)
    with pytest.raises(UnreachableError, match="tried 4 times"):
        place.fetch(server, attempts=4)
    assert len(server.requests) == 4
    assert place.kept == DATA[:4]


def test_a_blob_that_is_never_whole_is_given_up_after_a_time_for_its_size(
    serve: Serve, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it goes on: 30 seconds and the time for its bytes, and not for ever."""
    monkeypatch.setattr("expertctl.registry.download.PROGRESS", 1)
    clock = iter(range(0, 10**6, 50))
    fake = SimpleNamespace(monotonic=lambda: float(next(clock)), time=time.time)
    monkeypatch.setattr("expertctl.registry.download.time", fake)

    def script(request: ReceivedRequest) -> Reply:
        head, _, body = honest(request).partition(b"\r\n\r\n")
        return head + b"\r\n\r\n" + body[:1]

    with pytest.raises(UnreachableError, match="too slow; partial data is kept"):
        place.fetch(serve(script), attempts=2)


def test_what_another_registry_sent_is_not_gone_on_with(serve: Serve, place: Place) -> None:
    failing = [broken_at(4000), b"", b""]
    with pytest.raises(UnreachableError):
        place.fetch(serve(lambda _: failing.pop(0)))
    server = serve(honest)
    counts = place.fetch(server)
    assert (place.arrived, sum(counts)) == (DATA, len(DATA))
    assert [r.headers.get("range") for r in server.requests] == [None]


def test_an_etag_that_changed_means_from_the_start(serve: Serve, place: Place) -> None:
    server = serve(first_then(broken_at(4000, '"old"'), lambda r: honest(r, etag='"new"')))
    counts = place.fetch(server)
    assert (place.arrived, sum(counts)) == (DATA, len(DATA))
    assert [r.headers.get("if-range") for r in server.requests] == [None, '"old"', None]


def test_the_whole_blob_in_answer_to_a_range_is_not_appended(serve: Serve, place: Place) -> None:
    server = serve(first_then(broken_at(4000), lambda _: make_reply(200, DATA)))
    place.fetch(server)
    assert place.arrived == DATA
    assert [r.headers.get("range") for r in server.requests] == [None, "bytes=4000-", None]


def test_a_registry_that_never_grants_a_range_still_gets_there(serve: Serve, place: Place) -> None:
    def script(request: ReceivedRequest) -> Reply:
        return make_reply(416) if "range" in request.headers else make_reply(200, DATA)

    place.fetch(serve(first_then(broken_at(4000), script)))
    assert place.arrived == DATA


def test_a_registry_that_breaks_off_and_grants_no_range_is_given_up(
    serve: Serve, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time enough comes for the failure before it to be forgotten, and it is of no use."""
    monkeypatch.setattr("expertctl.registry.download.PROGRESS", 4000)

    def script(request: ReceivedRequest) -> Reply:
        return make_reply(200, DATA) if "range" in request.headers else broken_at(4000)

    with pytest.raises(RegistryError, match="changed during the download"):
        place.fetch(serve(script))


@pytest.mark.parametrize(
    "content_range",
    ["", "bytes 0-10239/10240", "bytes 3999-10239/10240", "bytes 4001-10239/10240",
     "bytes 4000-10238/10240", "bytes 4000-10239/10241", "bytes 4000-10239",
     "items 4000-10239/10240",
     "bytes 4000-99999999999999999999/10240", "bytes */10240"],
)  # fmt: skip
def test_a_wrong_content_range_is_refused(serve: Serve, place: Place, content_range: str) -> None:
    def script(_: ReceivedRequest) -> Reply:
        return make_reply(206, DATA[4000:], Content_Range=content_range)

    with pytest.raises(RegistryError, match="bytes 4000-10239 of 10240 were requested"):
        place.fetch(serve(first_then(broken_at(4000), script)))
    assert place.kept == DATA[:4000]
    assert not place.target.path(DIGEST).exists()


def test_a_content_range_of_unknown_length_is_good_enough(serve: Serve, place: Place) -> None:
    def script(_: ReceivedRequest) -> Reply:
        return make_reply(206, DATA[4000:], Content_Range=f"bytes 4000-{len(DATA) - 1}/*")

    place.fetch(serve(first_then(broken_at(4000), script)))
    assert place.arrived == DATA


def test_a_part_that_nobody_asked_for_is_refused(serve: Serve, place: Place) -> None:
    part = make_reply(206, DATA[5:], Content_Range=f"bytes 5-{len(DATA) - 1}/{len(DATA)}")
    with pytest.raises(RegistryError, match="were requested"):
        place.fetch(serve(part))
    with pytest.raises(RegistryError, match="it refuses a range"):
        place.fetch(serve(make_reply(416)))


def test_a_body_longer_than_promised_is_cut_and_refused(serve: Serve, place: Place) -> None:
    sent: list[int] = []

    def endless(_: ReceivedRequest) -> Iterator[bytes]:
        yield make_reply(200, DATA, length=-1)
        while True:
            sent.append(1)
            yield b"x" * 65536

    with pytest.raises(DigestError, match=f"longer than its {len(DATA)} bytes"):
        place.fetch(serve(endless))
    assert place.left() == []
    assert not place.target.path(DIGEST).exists()


@pytest.mark.parametrize("claimed", [len(DATA) - 1, len(DATA) + 1, 10**15])
def test_a_wrong_length_is_refused_before_a_byte_is_written(
    serve: Serve, place: Place, claimed: int
) -> None:
    with pytest.raises(DigestError, match="10240 bytes were requested"):
        place.fetch(serve(lambda _: [make_reply(200, DATA, length=claimed), StallMarker()]))
    assert place.left() == []


def test_an_answer_without_length_that_is_too_short_is_gone_on_with(
    serve: Serve, place: Place
) -> None:
    server = serve(first_then(make_reply(200, DATA[:100], length=-1)))
    place.fetch(server)
    assert place.arrived == DATA
    assert server.requests[1].headers["range"] == "bytes=100-"


def test_a_wrong_digest_is_refused_and_nothing_kept(serve: Serve, place: Place) -> None:
    server = serve(make_reply(200, DATA[:-1] + b"\0"))
    with pytest.raises(DigestError, match=r"weights\.safetensors of acme/sql does not have its"):
        place.fetch(server)
    assert place.left() == []
    assert list(place.target.folder.iterdir()) == []
    assert len(server.requests) == 1


def test_a_beginning_that_was_damaged_here_is_fetched_anew(serve: Serve, place: Place) -> None:
    failing = [broken_at(4000), b"", b""]
    server = serve(lambda r: failing.pop(0) if failing else honest(r))
    with pytest.raises(UnreachableError):
        place.fetch(server)
    part = place.downloads.folder / f"{DIGEST.hex}.part"
    part.write_bytes(b"\0" * 4000)
    counts = place.fetch(server)
    assert (place.arrived, sum(counts)) == (DATA, len(DATA))


@pytest.mark.parametrize("state", [b"", b"{", b'{"etag": "x"}', b'{"url": 1}'])
def test_a_beginning_of_unknown_origin_is_not_used(
    serve: Serve, place: Place, state: bytes
) -> None:
    make_folders(place.downloads.folder)
    (place.downloads.folder / f"{DIGEST.hex}.part").write_bytes(DATA[:4000])
    (place.downloads.folder / f"{DIGEST.hex}.json").write_bytes(state)
    server = serve(honest)
    place.fetch(server)
    assert place.arrived == DATA
    assert "range" not in server.requests[0].headers


def test_a_beginning_longer_than_the_blob_is_not_used(serve: Serve, place: Place) -> None:
    failing = [broken_at(4000), b"", b""]
    server = serve(lambda r: failing.pop(0) if failing else honest(r))
    with pytest.raises(UnreachableError):
        place.fetch(server)
    (place.downloads.folder / f"{DIGEST.hex}.part").write_bytes(DATA + b"more")
    place.fetch(server)
    assert place.arrived == DATA


def test_a_compressed_blob_is_refused(serve: Serve, place: Place) -> None:
    with pytest.raises(RegistryError, match="compressed"):
        place.fetch(serve(make_reply(200, DATA, Content_Encoding="br")))
    assert not place.target.path(DIGEST).exists()


def test_a_weak_etag_is_no_reason_to_go_on(serve: Serve, place: Place) -> None:
    server = serve(first_then(broken_at(4000, 'W/"1"')))
    place.fetch(server)
    assert place.arrived == DATA
    assert "if-range" not in server.requests[1].headers


def test_a_stalled_blob_goes_on_on_another_connection(serve: Serve, place: Place) -> None:
    server = serve(first_then([broken_at(4000), StallMarker()]))
    with make_client(server, stall=0.2) as http:
        oci = OciClient(http, server.address)
        download(place.downloads, oci, [FILE], place.target)
    assert place.arrived == DATA


def test_a_blob_that_is_not_there_ends_the_others_at_once(serve: Serve, place: Place) -> None:
    missing = FileDigest("gone", 5, Digest.compute(b"gone!"))
    begun = threading.Event()

    def script(request: ReceivedRequest) -> Reply:
        if request.path.endswith(missing.digest.hex):
            begun.wait(SECONDS)
            return make_reply(404)
        return stalled()

    def stalled() -> Iterator[bytes | StallMarker]:
        yield broken_at(100)
        begun.set()
        yield StallMarker()

    with pytest.raises(NotFoundError):
        place.fetch(serve(script), missing, FILE)
    assert list(place.target.folder.iterdir()) == []


def test_a_pause_ends_when_another_blob_fails(serve: Serve, place: Place) -> None:
    missing = FileDigest("gone", 5, Digest.compute(b"gone!"))
    begun = threading.Event()

    def script(request: ReceivedRequest) -> Reply:
        if request.path.endswith(missing.digest.hex):
            begun.wait(SECONDS)
            return make_reply(404)
        begun.set()
        return make_reply(503, Retry_After="60")

    server = serve(script)
    with RegistryHttp() as http:
        wanted = [BlobRequest(OciClient(http, server.address), "a/b", f) for f in (FILE, missing)]
        with pytest.raises(NotFoundError):
            place.downloads.fetch_all(wanted, place.target)


def test_a_full_disk_is_said_and_what_is_here_stays(
    serve: Serve, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    budget = [3000]

    def write(handle: int, data: memoryview) -> int:
        if len(data) < 1000:  # what is remembered beside it
            return real(handle, data)
        if not budget[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(handle, data[: budget[0]])
        budget[0] -= count
        return count

    server = serve(honest)
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFullError, match="no space left") as caught:
        place.fetch(server)
    assert "partial data is kept" in caught.value.hint
    assert place.kept == DATA[:3000]
    monkeypatch.undo()
    place.fetch(server)
    assert place.arrived == DATA
    assert server.requests[-1].headers["range"] == "bytes=3000-"


def test_another_failure_of_the_disk_is_not_called_a_full_one(serve: Serve, place: Place) -> None:
    place.target.folder.rmdir()
    with pytest.raises(FileNotFoundError):
        place.fetch(serve(honest))


def test_a_small_blob_that_broke_off_is_not_kept(serve: Serve, tmp_path: Path) -> None:
    place = new_place(tmp_path)
    place = Place(BlobDownloader(place.downloads.folder), place.target)
    failing = [broken_at(4000), b"", b""]
    server = serve(lambda r: failing.pop(0) if failing else honest(r))
    with pytest.raises(UnreachableError):
        place.fetch(server)
    assert place.left() == []
    place.fetch(server)
    assert place.arrived == DATA
    assert "range" not in server.requests[-1].headers


def test_a_second_process_neither_waits_nor_disturbs(serve: Serve, place: Place) -> None:
    make_folders(place.downloads.folder)
    base = place.downloads.folder / DIGEST.hex
    base.with_suffix(".part").write_bytes(b"of the other process")
    with FileLock(f"{base}.lock"):
        place.fetch(serve(honest))
    assert place.arrived == DATA
    assert place.kept == b"of the other process"
    assert len(list(place.downloads.folder.glob("*.part"))) == 1


def test_two_who_want_the_same_blob_at_once_both_get_it(serve: Serve, tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=120)

    def script(request: ReceivedRequest) -> Iterator[bytes]:
        whole = honest(request)
        yield whole[:-5000]
        both.wait()  # neither is served before both have begun
        yield whole[-5000:]

    server = serve(script)
    places = [
        Place(BlobDownloader(tmp_path / "partial", kept_bytes=0), StagingTarget(tmp_path / name))
        for name in "ab"
    ]
    for place in places:
        place.target.folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda place: sum(place.fetch(server, checked=False)), places))
    places[0].downloads.check_integrity()
    assert [place.arrived for place in places] == [DATA, DATA]
    assert counts == [len(DATA), len(DATA)]
    assert list((tmp_path / "partial").glob("*.part")) == []


def test_what_is_old_and_nobody_holds_is_swept(place: Place) -> None:
    folder = place.downloads.folder
    make_folders(folder)
    names = ("old.part", "old.json", "held.part", "young.part", "old-private.part", ".old.tmp")
    for name in names:
        (folder / name).write_bytes(b"x")
    for name in ("old.part", "held.part", "old-private.part", ".old.tmp"):
        os.utime(folder / name, (0, 0))
    with FileLock(f"{folder}/held.lock"):
        place.downloads.sweep()
    left = {path.name for path in folder.iterdir()} - {"held.lock"}
    assert left == {"held.part", "young.part"}
    BlobDownloader(folder / "missing").sweep()


PROGRAM = """
import sys
from pathlib import Path
from expertctl.digest import Digest, FileDigest
from expertctl.registry.address import RegistryAddress
from expertctl.registry.download import BlobDownloader, BlobRequest
from expertctl.registry.http import RegistryHttp
from expertctl.registry.client import OciClient
from tests.registry.test_download import StagingTarget, download

url, folder, digest, size = sys.argv[1:]
with RegistryHttp() as http:
    oci = OciClient(http, RegistryAddress.parse(url))
    file = FileDigest("f", int(size), Digest.parse(digest))
    download(
        BlobDownloader(Path(folder) / "partial", kept_bytes=0), oci, [file],
        StagingTarget(Path(folder) / "staging"), lambda count: print(count, flush=True),
    )
"""


def test_a_killed_process_leaves_what_another_goes_on_with(
    serve: Serve, place: Place, tmp_path: Path
) -> None:
    server = serve(first_then([broken_at(6000), StallMarker()]))
    words = [server.url, str(tmp_path), str(DIGEST), str(len(DATA))]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    received = 0
    while received < 6000:
        received += int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert place.kept == DATA[:6000]
    place.fetch(server)
    assert place.arrived == DATA
    assert server.requests[-1].headers["range"] == "bytes=6000-"


LIES: dict[str, ReplyScript] = {
    "none": honest,
    "cut": lambda request: honest(request)[:-1000],
    "whole": lambda _: make_reply(200, DATA),
    "wrong": lambda request: honest(request)[:-1] + b"\0",
    "long": lambda _: make_reply(200, DATA + b"x", length=-1),
    "short": lambda _: make_reply(200, DATA[:7], length=-1),
    "busy": lambda _: make_reply(503),
    "nothing": lambda _: b"",
    "no range": lambda _: make_reply(416),
    "another etag": lambda request: honest(request, etag='"2"'),
}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(answers=st.lists(st.sampled_from(list(LIES)), max_size=6))
def test_whatever_a_registry_answers_only_the_right_bytes_arrive(
    answers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rest = iter(answers)
    place = new_place(tmp_path_factory.mktemp("any"))
    with run_hostile_server(lambda request: LIES[next(rest, "none")](request)) as server:
        try:
            place.fetch(server)
        except ExpertError:
            assert not place.target.path(DIGEST).exists()
        else:
            assert hashlib.sha256(place.arrived).hexdigest() == DIGEST.hex


def test_how_long_a_beginning_is_kept_is_a_week() -> None:
    assert KEPT_SECONDS == 7 * 24 * 3600
