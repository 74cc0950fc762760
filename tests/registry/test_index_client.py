"""Asking for an index over real sockets, of servers that lie as well."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.errors import NotFoundError, RegistryError, SignatureError, StoreError, TrustError
from expertctl.reference import PackageName
from expertctl.registry import index_store
from expertctl.registry.http import RegistryHttp
from expertctl.registry.index_document import IndexDocument, sign_index
from expertctl.registry.index_store import IndexStore, fetch_index
from expertctl.trust.grants import KnownRegistry
from tests.registry.hostile_registry import (
    HostileServer,
    ReceivedRequest,
    Reply,
    StallMarker,
    make_client,
    make_reply,
)
from tests.registry.indexes import SQL, make_index_document, make_named_key, make_release


class World:
    """A server that answers as the test last said, and a client with its memory."""

    def __init__(self, folder: Path) -> None:
        self.answer: Reply = make_reply(404)
        self.server = HostileServer(self._said)
        self.store = IndexStore(folder)
        self.http: RegistryHttp | None = None

    def _said(self, _: ReceivedRequest) -> Reply:
        return self.answer

    @property
    def known(self) -> KnownRegistry:
        return KnownRegistry(
            self.server.address.host, self.server.url, make_named_key("index").public
        )

    def fetch(self, package: PackageName = SQL, *, offline: bool = False) -> IndexDocument:
        with make_client(self.server, attempts=1) as http:
            return fetch_index(http, self.known, package, self.store, offline=offline)

    def says(self, revision: int, *versions: str, by: str = "index") -> bytes:
        releases = [make_release(version) for version in versions or ("1.0.0",)]
        body = sign_index(make_index_document(revision, releases=releases), make_named_key(by))
        self.answer = make_reply(body=body)
        return body


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "registries")
    made.server.start()
    yield made
    made.server.stop()


def test_an_index_is_asked_for_by_its_name_and_remembered(world: World) -> None:
    world.says(4)
    assert world.fetch().revision == 4
    [request] = world.server.requests
    assert request.target == "/tuf/targets/index/acme/sql.json"
    assert "if-none-match" not in request.headers
    assert world.fetch(offline=True).revision == 4
    assert len(world.server.requests) == 1


def test_what_is_known_is_not_sent_again(world: World) -> None:
    body = world.says(4)
    world.fetch()
    world.answer = make_reply(304)
    assert world.fetch().revision == 4
    etag = f'"sha256:{hashlib.sha256(body).hexdigest()}"'
    assert world.server.requests[1].headers["if-none-match"] == etag


def test_nothing_new_of_what_was_never_seen_is_refused(world: World) -> None:
    world.answer = make_reply(304)
    with pytest.raises(RegistryError, match="304"):
        world.fetch()


def test_offline_what_was_never_asked_for_is_missing(world: World) -> None:
    with pytest.raises(NotFoundError, match="never asked about acme/sql"):
        world.fetch(offline=True)
    assert world.server.requests == []


def test_a_package_that_is_not_there_is_told_with_its_registry(world: World) -> None:
    with pytest.raises(NotFoundError, match=r"127\.0\.0\.1:\d+ has no package acme/sql"):
        world.fetch()


def test_a_package_that_vanishes_does_not_lower_the_floor(world: World) -> None:
    world.says(4)
    world.fetch()
    world.answer = make_reply(404)
    with pytest.raises(NotFoundError, match="has no package acme/sql"):
        world.fetch()
    world.says(3)
    with pytest.raises(TrustError, match="an older state is shown"):
        world.fetch()


def test_a_rollback_of_the_index_is_refused(world: World) -> None:
    world.says(4)
    world.fetch()
    world.says(3)
    with pytest.raises(TrustError, match="revision 3, but it had 4 before"):
        world.fetch()
    assert world.fetch(offline=True).revision == 4


def test_an_index_that_changes_without_a_new_revision_is_refused(world: World) -> None:
    world.says(4, "1.0.0")
    world.fetch()
    world.says(4, "1.0.1")
    with pytest.raises(TrustError, match="two things"):
        world.fetch()


def test_an_index_signed_by_a_key_that_was_not_pinned_is_refused(world: World) -> None:
    world.says(4, by="mallory")
    with pytest.raises(TrustError, match="the registry's index key is"):
        world.fetch()
    with pytest.raises(NotFoundError):
        world.fetch(offline=True)


def test_the_index_of_another_package_in_its_place_is_refused(world: World) -> None:
    world.says(4)
    with pytest.raises(TrustError, match="asked for the index of acme/other, but got"):
        world.fetch(PackageName("acme", "other"))


def test_an_unsigned_index_is_refused(world: World) -> None:
    world.answer = make_reply(body=make_index_document().encode())
    with pytest.raises(SignatureError, match="not a signed envelope"):
        world.fetch()


@pytest.mark.parametrize("claimed", [-1, 10**12], ids=["no length", "a huge length"])
def test_an_endless_index_is_cut(
    claimed: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_store, "MAX_ENVELOPE", 100_000)
    head = make_reply(length=claimed)
    world.answer = [head, *[b"x" * 10_000] * 11, StallMarker()]
    with pytest.raises(RegistryError, match="more than 100000 bytes"):
        world.fetch()


def test_an_index_that_ends_early_is_refused(world: World) -> None:
    body = world.says(4)
    world.answer = make_reply(body=body[:-20], length=len(body))
    with pytest.raises(RegistryError):
        world.fetch()
    world.answer = make_reply(body=body[:-20])
    with pytest.raises(SignatureError):
        world.fetch()


def test_a_damaged_memory_is_told_before_the_registry_is_asked(world: World) -> None:
    world.says(4)
    world.fetch()
    world.store.path(world.known, SQL).write_bytes(b"{}")
    with pytest.raises(StoreError, match="cannot be read"):
        world.fetch()
    assert len(world.server.requests) == 1


def test_a_registry_that_is_gone_is_no_reason_to_believe_the_past(world: World) -> None:
    world.says(4)
    world.fetch()
    world.answer = make_reply(503)
    with pytest.raises(RegistryError):
        world.fetch()
