"""Uploads over HTTP: whole, in chunks, streamed, resumed, cancelled, and abused."""

import os
import threading
from collections import namedtuple

import httpx2
import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from registry_server.app import sweep_uploads
from registry_server.database.tables import BLOBS, REPOSITORY_BLOBS, UPLOADS
from registry_server.oci import uploads
from registry_server.oci.uploads import open_upload_file
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import (
    begin_upload,
    compute_digest,
    iterate_chunks,
    push_blob,
    random_bytes,
    read_error_code,
)

DATA = random_bytes(3000)
DIGEST = compute_digest(DATA)
BLOB = f"/v2/acme/x/blobs/{DIGEST}"


def chunk(client: TestClient, location: str, start: int, stop: int) -> httpx2.Response:
    """PATCH these bytes of `DATA`."""
    headers = {"Content-Range": f"{start}-{stop - 1}"}
    return client.patch(location, content=DATA[start:stop], headers=headers)


def finish(client: TestClient, location: str, content: bytes = b"") -> httpx2.Response:
    return client.put(location, params={"digest": DIGEST}, content=content)


def rows(served: RegistryHarness, table: object) -> int:
    with served.registry.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())  # type: ignore[arg-type]


def nothing_is_left(served: RegistryHarness) -> bool:
    return rows(served, UPLOADS) == 0 and list(served.settings.uploads.iterdir()) == []


def test_one_request_can_be_a_whole_upload(served: RegistryHarness, alice: TestClient) -> None:
    answer = alice.post(f"/v2/acme/x/blobs/uploads/?digest={DIGEST}", content=DATA)
    assert (answer.status_code, answer.headers["Location"]) == (201, BLOB)
    assert answer.headers["Docker-Content-Digest"] == DIGEST
    assert alice.get(BLOB).content == DATA
    assert nothing_is_left(served)


def test_an_upload_is_begun_and_then_put(served: RegistryHarness, alice: TestClient) -> None:
    answer = finish(alice, begin_upload(alice, "acme/x"), DATA)
    assert (answer.status_code, answer.headers["Location"]) == (201, BLOB)
    assert alice.get(BLOB).content == DATA
    assert nothing_is_left(served)


def test_chunks_in_order_make_a_blob(served: RegistryHarness, alice: TestClient) -> None:
    location = begin_upload(alice, "acme/x")
    for start, stop in ((0, 1000), (1000, 1001), (1001, 2500)):
        answer = chunk(alice, location, start, stop)
        assert (answer.status_code, answer.headers["Range"]) == (202, f"0-{stop - 1}")
        location = answer.headers["Location"]
    headers = {"Content-Range": "2500-2999"}
    answer = alice.put(location, params={"digest": DIGEST}, content=DATA[2500:], headers=headers)
    assert answer.status_code == 201
    assert alice.get(BLOB).content == DATA
    assert nothing_is_left(served)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_stream_without_a_length_makes_a_blob(
    served: RegistryHarness, alice: TestClient, size: int
) -> None:
    data = random_bytes(size)
    digest = compute_digest(data)
    answer = alice.patch(begin_upload(alice, "acme/x"), content=iterate_chunks(data, 70_001))
    assert (answer.status_code, answer.headers["Range"]) == (202, f"0-{size - 1}")
    done = alice.put(answer.headers["Location"], params={"digest": digest})
    assert done.status_code == 201
    direct = alice.post(
        f"/v2/acme/y/blobs/uploads/?digest={digest}", content=iterate_chunks(data, 70_001)
    )
    assert direct.status_code == 201
    assert alice.get(f"/v2/acme/y/blobs/{digest}").content == data
    assert nothing_is_left(served)


def test_a_blob_may_be_named_by_sha512_whatever_was_hashed_on_the_way(alice: TestClient) -> None:
    digest = compute_digest(DATA, "sha512")
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 3000)
    assert alice.put(location, params={"digest": digest}).status_code == 201
    assert alice.get(f"/v2/acme/x/blobs/{digest}").content == DATA


def test_an_upload_can_say_that_it_will_be_named_by_sha512(alice: TestClient) -> None:
    digest = compute_digest(DATA, "sha512")
    begun = alice.post("/v2/acme/x/blobs/uploads/?digest-algorithm=sha512")
    done = alice.put(begun.headers["Location"], params={"digest": digest}, content=DATA)
    assert (begun.status_code, done.status_code) == (202, 201)
    unknown = alice.post("/v2/acme/x/blobs/uploads/?digest-algorithm=md5")
    assert (unknown.status_code, read_error_code(unknown)) == (400, "DIGEST_INVALID")


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1000), (500, 1500), (1001, 2000), (2000, 3000), (999, 1000)],
    ids=["duplicate", "overlap", "gap of one", "gap", "one byte again"],
)
@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_a_chunk_that_is_not_the_next_is_416_and_says_where_to_go_on(
    alice: TestClient, method: str, start: int, stop: int
) -> None:
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 1000)
    headers = {"Content-Range": f"{start}-{stop - 1}"}
    query = {"digest": DIGEST} if method == "PUT" else {}
    answer = alice.request(
        method, location, params=query, content=DATA[start:stop], headers=headers
    )
    assert (answer.status_code, read_error_code(answer)) == (416, "RANGE_INVALID")
    assert (answer.headers["Location"], answer.headers["Range"]) == (location, "0-999")
    assert chunk(alice, location, 1000, 3000).status_code == 202
    assert finish(alice, location).status_code == 201


@pytest.mark.parametrize(
    "header", ["", "x", "0-", "-9", "9-0", "bytes 0-9/10", "0-9,10-19", "0\u20139"]
)
def test_a_chunk_whose_range_says_nothing_sane_is_refused(alice: TestClient, header: str) -> None:
    location = begin_upload(alice, "acme/x")
    answer = alice.patch(
        location,
        content=DATA[:10],
        headers=[(b"Content-Range", header.encode())],  # type: ignore[list-item]
    )
    assert (answer.status_code, read_error_code(answer)) == (400, "BLOB_UPLOAD_INVALID")
    assert alice.get(location).headers["Range"] == "0-0"
    assert finish(alice, location, DATA).status_code == 201


def test_a_chunk_of_another_length_than_its_range_is_refused(alice: TestClient) -> None:
    location = begin_upload(alice, "acme/x")
    headers = {"Content-Range": "0-9"}
    declared = alice.patch(location, content=DATA[:11], headers=headers)
    assert (declared.status_code, read_error_code(declared)) == (400, "BLOB_UPLOAD_INVALID")
    for length in (9, 11, 2_000_000):
        body = iterate_chunks(random_bytes(length), 70_000)
        streamed = alice.patch(location, content=body, headers=headers)
        assert (streamed.status_code, read_error_code(streamed)) == (400, "SIZE_INVALID")
    assert finish(alice, location, DATA).status_code == 201


def test_the_state_of_an_upload_is_where_it_goes_on(alice: TestClient) -> None:
    location = begin_upload(alice, "acme/x")
    fresh = alice.get(location)
    assert (fresh.status_code, fresh.headers["Range"], fresh.content) == (204, "0-0", b"")
    chunk(alice, location, 0, 1000)
    later = alice.get(location)
    assert (later.headers["Range"], later.headers["Location"]) == ("0-999", location)
    assert later.headers["Docker-Upload-UUID"] == location.rpartition("/")[2]


def test_a_cancelled_upload_is_gone(served: RegistryHarness, alice: TestClient) -> None:
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 1000)
    assert alice.delete(location).status_code == 204
    for answer in (alice.get(location), alice.delete(location), finish(alice, location, DATA)):
        assert (answer.status_code, read_error_code(answer) if answer.content else "") in {
            (404, "BLOB_UPLOAD_UNKNOWN")
        }
    assert nothing_is_left(served)


def test_a_finished_upload_is_gone(alice: TestClient) -> None:
    location = begin_upload(alice, "acme/x")
    finish(alice, location, DATA)
    assert alice.get(location).status_code == 404


@pytest.mark.parametrize("how", ["post", "put", "chunked", "streamed"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_bytes_of_another_digest_become_nothing(
    served: RegistryHarness, alice: TestClient, how: str, algorithm: str
) -> None:
    digest = compute_digest(b"promised", algorithm)
    if how == "post":
        answer = alice.post(f"/v2/acme/x/blobs/uploads/?digest={digest}", content=DATA)
    elif how == "put":
        location = begin_upload(alice, "acme/x")
        answer = alice.put(location, params={"digest": digest}, content=DATA)
    else:
        location = begin_upload(alice, "acme/x")
        headers = {"Content-Range": "0-2999"} if how == "chunked" else {}
        alice.patch(location, content=DATA, headers=headers)
        answer = alice.put(location, params={"digest": digest})
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")
    assert alice.head(f"/v2/acme/x/blobs/{digest}").status_code == 404
    assert alice.head(BLOB).status_code == 404
    assert nothing_is_left(served)
    assert rows(served, BLOBS) == rows(served, REPOSITORY_BLOBS) == 0
    assert list(served.registry.storage.list_blobs()) == []


@pytest.mark.parametrize("digest", ["", "sha256:../../x", "sha256:AB", "md5:" + "0" * 32])
def test_an_upload_ends_only_under_a_digest(alice: TestClient, digest: str) -> None:
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 3000)
    query = {"digest": digest} if digest else {}
    answer = alice.put(location, params=query)
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")
    assert finish(alice, location).status_code == 201


@pytest.mark.parametrize(
    "guess", ["0" * 32, "x" * 32, "..", "a" * 31, "A" * 32, "../../registry.db", "%2e%2e"]
)
@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT", "DELETE"])
def test_a_guessed_upload_is_none(alice: TestClient, method: str, guess: str) -> None:
    query = {"digest": DIGEST} if method == "PUT" else {}
    answer = alice.request(method, f"/v2/acme/x/blobs/uploads/{guess}", params=query)
    assert answer.status_code in {400, 404, 405}


def test_upload_ids_have_128_bits_and_no_order(alice: TestClient) -> None:
    ids = [begin_upload(alice, "acme/x").rpartition("/")[2] for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(len(bytes.fromhex(text)) == 16 for text in ids)
    assert ids != sorted(ids)


@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT", "DELETE"])
def test_an_upload_belongs_to_its_user_and_its_repository(
    served: RegistryHarness, alice: TestClient, method: str
) -> None:
    carol = served.client(served.create_user("carol", admin=True))
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 1000)
    query = {"digest": DIGEST} if method == "PUT" else {}
    elsewhere = location.replace("acme/x", "acme/y")
    for client, address in ((carol, location), (alice, elsewhere)):
        answer = client.request(method, address, params=query, content=DATA[1000:])
        assert answer.status_code == 404
    assert alice.get(location).headers["Range"] == "0-999"
    assert chunk(alice, location, 1000, 3000).status_code == 202


def test_who_may_not_push_begins_no_upload(served: RegistryHarness, alice: TestClient) -> None:
    reader, nobody = served.client(served.create_user("dora")), served.client()
    digest = compute_digest(b"")
    for path in ("/v2/acme/x/blobs/uploads/", f"/v2/acme/x/blobs/uploads/?digest={digest}"):
        assert (reader.post(path).status_code, nobody.post(path).status_code) == (403, 401)
    assert nothing_is_left(served)


def test_rights_that_end_during_an_upload_end_the_upload(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 3000)
    with served.registry.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM members")
    answers = [chunk(alice, location, 0, 1), finish(alice, location), alice.get(location)]
    assert [answer.status_code for answer in answers] == [403, 403, 403]
    assert rows(served, BLOBS) == 0


def test_an_upload_goes_on_after_a_restart_hashed_from_its_file(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    chunk(alice, location, 0, 2000)
    secret = served.create_token("alice")
    again = served.reopen()
    client = again.client(secret)
    assert client.get(location).headers["Range"] == "0-1999"
    assert chunk(client, location, 2000, 3000).status_code == 202
    assert finish(client, location).status_code == 201
    assert client.get(BLOB).content == DATA
    again.close()


def test_only_one_request_at_a_time_writes_to_an_upload(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    held = open_upload_file(served.settings.uploads / location.rpartition("/")[2])
    answer = chunk(alice, location, 0, 1000)
    assert (answer.status_code, read_error_code(answer)) == (409, "BLOB_UPLOAD_BUSY")
    assert answer.headers["Retry-After"] == "1"
    held.close()
    assert chunk(alice, location, 0, 1000).status_code == 202


def test_an_upload_whose_file_is_gone_is_unknown(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    (served.settings.uploads / location.rpartition("/")[2]).unlink()
    for answer in (alice.get(location), finish(alice, location, DATA)):
        assert answer.status_code == 404


def test_a_link_in_the_place_of_an_upload_is_not_followed(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    file = served.settings.uploads / location.rpartition("/")[2]
    file.unlink()
    file.symlink_to(served.settings.database)
    assert chunk(alice, location, 0, 1000).status_code == 503
    served.registry.database.check_integrity()


def kept(client: TestClient, location: str) -> int:
    last = int(client.get(location).headers["Range"].removeprefix("0-"))
    return last + 1 if last else 0


def test_a_blob_beyond_the_limit_is_413_before_its_bytes_are_looked_at(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(blob_bytes=1000)
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    alice = served.client(secret)
    whole = alice.post(f"/v2/acme/x/blobs/uploads/?digest={DIGEST}", content=DATA)
    streamed = alice.patch(begin_upload(alice, "acme/x"), content=iterate_chunks(DATA, 100))
    location = begin_upload(alice, "acme/x")
    assert chunk(alice, location, 0, 1000).status_code == 202
    beyond = chunk(alice, location, 1000, 1001)
    for answer in (whole, streamed, beyond):
        assert (answer.status_code, read_error_code(answer)) == (413, "SIZE_INVALID")
    assert push_blob(alice, "acme/x", DATA[:1000])


def quota_registry(make_registry: NewRegistry, quota: int) -> tuple[RegistryHarness, TestClient]:
    served = make_registry()
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice", quota=quota)
    return served, served.client(secret)


def test_the_quota_is_asked_before_bytes_are_written(make_registry: NewRegistry) -> None:
    served, alice = quota_registry(make_registry, 2_500_000)
    location = begin_upload(alice, "acme/x")
    big = random_bytes(2_600_000)
    answers = [
        alice.post(f"/v2/acme/x/blobs/uploads/?digest={compute_digest(big)}", content=big),
        alice.patch(location, content=big),
        alice.patch(location, content=iterate_chunks(big, 100_000)),
        alice.put(
            location, params={"digest": compute_digest(big)}, content=iterate_chunks(big, 100_000)
        ),
    ]
    assert [(a.status_code, read_error_code(a)) for a in answers] == [(403, "DENIED")] * 4
    assert all(a.json()["errors"][0]["detail"]["code"] == "budget" for a in answers)
    assert kept(alice, location) <= 2_500_000
    assert rows(served, BLOBS) == 0


def test_small_blobs_count_too(make_registry: NewRegistry) -> None:
    served, alice = quota_registry(make_registry, 5000)
    push_blob(alice, "acme/x", random_bytes(3000, "a"))
    other = random_bytes(3000, "b")
    answer = alice.post(f"/v2/acme/x/blobs/uploads/?digest={compute_digest(other)}", content=other)
    assert (answer.status_code, read_error_code(answer)) == (403, "DENIED")
    push_blob(alice, "acme/y", random_bytes(3000, "a"))
    assert rows(served, BLOBS) == 1
    assert nothing_is_left(served)


def test_open_uploads_take_room_until_they_are_cancelled(make_registry: NewRegistry) -> None:
    _, alice = quota_registry(make_registry, 5000)
    first, second = begin_upload(alice, "acme/x"), begin_upload(alice, "acme/y")
    assert chunk(alice, first, 0, 3000).status_code == 202
    refused = chunk(alice, second, 0, 3000)
    assert (refused.status_code, read_error_code(refused)) == (403, "DENIED")
    assert alice.delete(first).status_code == 204
    assert chunk(alice, second, 0, 3000).status_code == 202


def test_many_small_chunks_without_an_end_do_not_pass_the_quota(
    make_registry: NewRegistry,
) -> None:
    served, alice = quota_registry(make_registry, 5000)
    statuses = set()
    for _ in range(12):
        statuses.add(
            alice.patch(begin_upload(alice, "acme/x"), content=random_bytes(1000)).status_code
        )
    stored = sum(file.stat().st_size for file in served.settings.uploads.iterdir())
    assert statuses == {202, 403}
    assert stored <= 5000


def test_uploads_side_by_side_do_not_overshoot_the_quota(make_registry: NewRegistry) -> None:
    served, alice = quota_registry(make_registry, 4_000_000)
    bodies = [random_bytes(1_500_000, str(i)) for i in range(6)]
    answers: list[int] = []

    def push(body: bytes) -> None:
        path = f"/v2/acme/x/blobs/uploads/?digest={compute_digest(body)}"
        answers.append(alice.post(path, content=body).status_code)

    threads = [threading.Thread(target=push, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = sum(blob.size for blob in served.registry.storage.list_blobs())
    assert answers.count(201) == 2
    assert answers.count(403) == 4
    assert used == 3_000_000


def test_a_declared_length_that_never_comes_holds_no_room_afterwards(
    make_registry: NewRegistry,
) -> None:
    _, alice = quota_registry(make_registry, 5_000_000)
    location = begin_upload(alice, "acme/x")
    headers = {"Content-Range": "0-3999999"}
    answer = alice.patch(location, content=iterate_chunks(DATA, 1000), headers=headers)
    assert (answer.status_code, read_error_code(answer)) == (400, "SIZE_INVALID")
    assert push_blob(alice, "acme/y", random_bytes(4_500_000))


Free = namedtuple("Free", ["f_bavail", "f_frsize"])


def test_below_the_floor_of_free_space_nothing_is_accepted(
    served: RegistryHarness, alice: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = begin_upload(alice, "acme/x")
    floor = served.settings.limits.free_bytes
    monkeypatch.setattr(os, "statvfs", lambda _: Free(floor + 2999, 1))
    refused = [
        chunk(alice, location, 0, 3000),
        alice.put("/v2/acme/x/manifests/v1", content=b"{}"),
    ]
    assert [(a.status_code, read_error_code(a)) for a in refused] == [(507, "UNAVAILABLE")] * 2
    assert chunk(alice, location, 0, 2999).status_code == 202
    assert alice.get(location).headers["Range"] == "0-2998"


def test_attack_86_abandoned_uploads_are_swept(served: RegistryHarness, alice: TestClient) -> None:
    old = begin_upload(alice, "acme/x")
    chunk(alice, old, 0, 3000)
    day = served.settings.limits.upload_seconds
    with served.registry.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE uploads SET updated = updated - {day + 1}")
    young = begin_upload(alice, "acme/x")
    old_file = min(served.settings.uploads.iterdir(), key=lambda file: -file.stat().st_size)
    os.utime(old_file, (0, 0))
    sweep_uploads(served.registry)
    assert [alice.get(location).status_code for location in (old, young)] == [404, 204]
    assert rows(served, UPLOADS) == len(list(served.settings.uploads.iterdir())) == 1


def test_attack_86_nobody_begins_uploads_without_end(
    served: RegistryHarness, alice: TestClient, bob: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_OPEN_UPLOADS", 3)
    locations = [begin_upload(alice, "acme/x") for _ in range(3)]
    refused = alice.post("/v2/acme/x/blobs/uploads/")
    assert (refused.status_code, read_error_code(refused)) == (403, "DENIED")
    assert begin_upload(bob, "other/x")
    alice.delete(locations[0])
    assert begin_upload(alice, "acme/x")
    assert len(list(served.settings.uploads.iterdir())) == 4


def test_pushing_the_same_blob_again_is_no_new_blob(
    served: RegistryHarness, alice: TestClient
) -> None:
    assert push_blob(alice, "acme/x", DATA) == push_blob(alice, "acme/x", DATA)
    assert (rows(served, BLOBS), rows(served, REPOSITORY_BLOBS)) == (1, 1)


def test_every_received_blob_is_counted(served: RegistryHarness, alice: TestClient) -> None:
    push_blob(alice, "acme/x", DATA)
    text = served.registry.metrics.render_exposition(served.registry.database).decode()
    assert "expertctl_registry_uploads_total 1.0" in text
