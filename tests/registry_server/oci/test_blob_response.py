"""How a blob is handed to the server: by its path, or in pieces."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from registry_server.oci.blobs import CHUNK_BYTES, BlobResponse, ByteRange
from tests.registry_server.oci.images import random_bytes

Sent = list[dict[str, Any]]


def sent(
    file: Path,
    *,
    method: str = "GET",
    part: ByteRange | None = None,
    pathsend: bool,
    size: int,
    leaves_after: int | None = None,
) -> Sent:
    """Everything that an answer sends to the server; the client may leave after some of it."""
    messages: Sent = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait() if leaves_after is None else await client_leaves()

    async def client_leaves() -> Any:
        while len(messages) <= (leaves_after or 0):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    response = BlobResponse(file, size=size, part=part, headers={"ETag": "x"})
    extensions: dict[str, Any] = {"http.response.pathsend": {}} if pathsend else {}
    scope = {"type": "http", "method": method, "extensions": extensions}
    asyncio.run(response(scope, receive, send))
    return messages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(random_bytes(CHUNK_BYTES * 2 + 5))
    return path


def test_where_the_server_can_send_files_it_gets_the_path_alone(file: Path) -> None:
    start, path = sent(file, pathsend=True, size=CHUNK_BYTES * 2 + 5)
    assert (start["status"], path) == (200, {"type": "http.response.pathsend", "path": str(file)})
    assert (b"content-length", str(CHUNK_BYTES * 2 + 5).encode()) in start["headers"]


def test_other_servers_get_pieces_of_a_bounded_size(file: Path) -> None:
    start, *bodies = sent(file, pathsend=False, size=CHUNK_BYTES * 2 + 5)
    assert start["status"] == 200
    assert b"".join(body["body"] for body in bodies) == file.read_bytes()
    assert max(len(body["body"]) for body in bodies) == CHUNK_BYTES
    assert [body.get("more_body", False) for body in bodies] == [True, True, True, False]


@pytest.mark.parametrize("pathsend", [True, False])
def test_a_part_is_read_from_its_start_to_its_stop(file: Path, pathsend: bool) -> None:
    part = ByteRange(7, CHUNK_BYTES + 9)
    start, *bodies = sent(file, part=part, pathsend=pathsend, size=CHUNK_BYTES * 2 + 5)
    assert start["status"] == 206
    assert b"".join(body["body"] for body in bodies) == file.read_bytes()[7 : CHUNK_BYTES + 9]


@pytest.mark.parametrize("pathsend", [True, False])
def test_head_opens_no_file(tmp_path: Path, pathsend: bool) -> None:
    start, body = sent(tmp_path / "nowhere", method="HEAD", pathsend=pathsend, size=9)
    assert (start["status"], body["body"]) == (200, b"")


def test_a_file_that_shrinks_while_it_is_sent_ends_the_answer_early(file: Path) -> None:
    with pytest.raises(OSError, match="shorter"):
        sent(file, pathsend=False, size=CHUNK_BYTES * 3)


def test_nothing_more_is_read_for_a_client_that_has_left(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(CHUNK_BYTES * 50))
    start, *bodies = sent(path, pathsend=False, size=CHUNK_BYTES * 50, leaves_after=1)
    assert start["status"] == 200
    assert 1 <= len(bodies) < 50
    assert all(body["more_body"] for body in bodies)
