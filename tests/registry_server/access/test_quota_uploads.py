"""Quotas as uploads meet them, over the whole application."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from starlette.testclient import TestClient

from registry_server.access import namespaces
from tests.registry_server.harness import RegistryHarness


def push(client: TestClient, repository: str, data: bytes) -> int:
    """Upload a blob in two steps; return the last status."""
    begun = client.post(f"/v2/{repository}/blobs/uploads/")
    if begun.status_code != 202:
        return begun.status_code
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    place = begun.headers["location"]
    return client.put(place, params={"digest": digest}, content=data).status_code


def used(served: RegistryHarness, namespace_id: int) -> int:
    with served.registry.database.read() as connection:
        return namespaces.get_used_bytes(connection, namespace_id)


def test_attack_86_parallel_uploads_stay_within_the_quota(served: RegistryHarness) -> None:
    secret = served.create_user("olga")
    acme = served.create_namespace("acme", owner="olga", quota=100_000)
    together = Barrier(8, timeout=60)

    def upload(number: int) -> int:
        client = TestClient(
            served.app,
            base_url=served.settings.public_url,
            headers={"Authorization": f"Bearer {secret}"},
        )
        together.wait()
        return push(client, f"acme/r{number % 3}", bytes([number]) * 30_000)

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(upload, range(8)))
    assert sorted(statuses) == [201] * 3 + [403] * 5
    assert used(served, acme) <= 100_000


def test_attack_86_bytes_that_were_refused_are_free_again(served: RegistryHarness) -> None:
    client = served.client(served.create_user("olga"))
    acme = served.create_namespace("acme", owner="olga", quota=1000)
    assert push(client, "acme/a", b"a" * 1001) == 403
    assert push(client, "acme/a", b"b" * 900) == 201
    assert used(served, acme) >= 900


def test_attack_86_the_same_blob_again_costs_nothing(served: RegistryHarness) -> None:
    client = served.client(served.create_user("olga"))
    acme = served.create_namespace("acme", owner="olga", quota=1000)
    assert push(client, "acme/a", b"a" * 400) == 201
    assert push(client, "acme/b", b"a" * 400) == 201
    assert used(served, acme) == 400


def test_attack_86_what_others_have_is_neither_free_nor_faster_to_see(
    served: RegistryHarness,
) -> None:
    """Whether a digest exists elsewhere shows neither in statuses nor in what is used."""
    olga, eve = (served.client(served.create_user(name)) for name in ("olga", "eve"))
    served.create_namespace("acme", owner="olga")
    own = served.create_namespace("evil", owner="eve", quota=1000)
    data = b"a secret of acme" * 10
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert push(olga, "acme/a", data) == 201
    assert eve.head(f"/v2/evil/a/blobs/{digest}").status_code == 404
    assert push(eve, "evil/b", b"x") == 201
    before = used(served, own)
    assert push(eve, "evil/a", data) == 201
    assert used(served, own) == before + len(data)


def test_attack_86_an_abandoned_upload_holds_its_room_until_it_is_given_up(
    served: RegistryHarness,
) -> None:
    client = served.client(served.create_user("olga"))
    acme = served.create_namespace("acme", owner="olga", quota=1000)
    place = client.post("/v2/acme/a/blobs/uploads/").headers["location"]
    assert client.patch(place, content=b"a" * 600).status_code == 202
    assert used(served, acme) == 600
    assert push(client, "acme/b", b"b" * 600) == 403
    assert client.delete(place).status_code == 204
    assert used(served, acme) == 0
    assert push(client, "acme/b", b"b" * 600) == 201


def test_attack_86_uploads_in_many_small_pieces_end_at_the_quota(served: RegistryHarness) -> None:
    client = served.client(served.create_user("olga"))
    acme = served.create_namespace("acme", owner="olga", quota=1000)
    place = client.post("/v2/acme/a/blobs/uploads/").headers["location"]
    statuses = []
    for _ in range(6):
        answer = client.patch(place, content=b"a" * 300)
        statuses.append(answer.status_code)
        place = answer.headers.get("location", place)
    assert statuses[:3] == [202] * 3
    assert set(statuses[3:]) == {403}
    assert used(served, acme) <= 1000
