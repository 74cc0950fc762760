"""Two at once on a real file: real threads, and real processes where the write lock must hold."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest

from expertctl.errors import ConflictError, ExpertError, RevokedError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.publishing import releases
from registry_server.publishing.releases import PublishResult, add_key, revoke_key, yank_release
from registry_server.registry import Registry, open_registry
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    publish_uploaded,
    pull_package,
    read_published_index,
    sign_with_other_key,
    upload_and_publish,
    upload_blobs,
)

pytestmark = pytest.mark.all

_Result = TypeVar("_Result")
ROUNDS = 8


def at_once(*works: Callable[[], _Result]) -> list[_Result | ExpertError]:
    """Do all at the same moment; return what each gave, or how it was refused."""
    barrier = Barrier(len(works))

    def begin(work: Callable[[], _Result]) -> _Result | ExpertError:
        barrier.wait()
        try:
            return work()
        except ExpertError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(begin, work) for work in works]]


def created(results: list[PublishResult | ExpertError]) -> list[bool]:
    return sorted(r.created for r in results if isinstance(r, PublishResult))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_of_two_publishers_with_other_content_one_wins(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey, number: int
) -> None:
    version = f"1.0.{number}"
    rivals = [
        template.make_package(version=version, key=alice, description=text) for text in ("a", "b")
    ]
    for parcel in rivals:
        upload_blobs(registry, parcel)
    results = at_once(*(lambda p=p: publish_uploaded(registry, owner, p) for p in rivals))
    winners = [p for p, r in zip(rivals, results, strict=True) if isinstance(r, PublishResult)]
    [loss] = [r for r in results if isinstance(r, ExpertError)]
    assert isinstance(loss, ConflictError)
    [release] = read_published_index(registry, owner).releases
    assert release.content_digest == winners[0].content_digest
    assert read_published_index(registry, owner).revision == 1
    pull_package(registry, winners[0].name, winners[0].package_digest)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_two_publishers_of_the_same_package_both_succeed(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey, number: int
) -> None:
    parcel = template.make_package(version=f"1.0.{number}", key=alice)
    upload_blobs(registry, parcel)
    results = at_once(*(lambda: publish_uploaded(registry, owner, parcel) for _ in range(3)))
    assert created(results) == [False, False, True]
    index = read_published_index(registry, owner)
    assert index.revision == 1
    assert [f.package_digest for f in index.releases[0].forms] == [parcel.package_digest]


def test_two_signatures_of_one_content_are_both_kept(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    add_key(registry, owner, namespace="acme", public_key=bob.public.pem(), statement=None)
    first = template.make_package(key=alice)
    second = sign_with_other_key(first, bob)
    for parcel in (first, second):
        upload_blobs(registry, parcel)
    results = at_once(*(lambda p=p: publish_uploaded(registry, owner, p) for p in (first, second)))
    assert created(results) == [True, True]
    index = read_published_index(registry, owner)
    assert index.revision == 2
    digests = {form.package_digest for form in index.releases[0].forms}
    assert digests == {first.package_digest, second.package_digest}


def test_versions_published_at_once_are_all_there(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcels = [template.make_package(version=f"1.{n}.0", key=alice) for n in range(8)]
    results = at_once(*(lambda p=p: upload_and_publish(registry, owner, p) for p in parcels))
    assert created(results) == [True] * 8
    index = read_published_index(registry, owner)
    assert index.revision == 8
    assert [str(r.version) for r in index.releases] == [p.version for p in parcels]


def test_look_alike_names_published_at_once_are_not_both_taken(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcels = [template.make_package(f"acme/{name}", key=alice) for name in ("modern", "modem")]
    results = at_once(*(lambda p=p: upload_and_publish(registry, owner, p) for p in parcels))
    assert created(results) == [True]
    assert [type(r) for r in results if isinstance(r, ExpertError)] == [ConflictError]


def test_two_servers_on_one_folder_agree_on_the_winner(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    """The write lock is the database's, not the process's."""
    other = open_registry(registry.settings)
    try:
        for number in range(ROUNDS):
            rivals = [
                template.make_package(version=f"2.0.{number}", key=alice, description=text)
                for text in ("a", "b")
            ]
            pairs = list(zip((registry, other), rivals, strict=True))
            results = at_once(*(lambda r=r, p=p: upload_and_publish(r, owner, p) for r, p in pairs))
            assert created(results) == [True]
        assert read_published_index(registry, owner).revision == ROUNDS
    finally:
        other.close()


def between(monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]) -> None:
    """Let something happen between reading the bytes of a package and the write lock."""
    real = releases._read_contents

    def slow(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(releases, "_read_contents", real)
        first()
        return found

    monkeypatch.setattr(releases, "_read_contents", slow)


def test_a_key_that_is_revoked_while_the_bytes_are_read_does_not_count(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    between(
        monkeypatch,
        lambda: revoke_key(
            registry, owner, namespace="acme", key_id=alice.public.key_id, reason="stolen"
        ),
    )
    with pytest.raises(RevokedError, match="stolen"):
        upload_and_publish(registry, owner, template.make_package(version="1.1.0", key=alice))
    assert [str(r.version) for r in read_published_index(registry, owner).releases] == ["1.0.0"]


def test_a_version_that_another_takes_while_the_bytes_are_read_is_refused(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faster = template.make_package(key=alice, description="faster")
    between(monkeypatch, lambda: upload_and_publish(registry, owner, faster))
    with pytest.raises(ConflictError):
        upload_and_publish(registry, owner, template.make_package(key=alice, description="slower"))
    assert read_published_index(registry, owner).description == "faster"


def test_the_same_package_from_another_while_the_bytes_are_read_is_nothing_new(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parcel = template.make_package(key=alice)
    between(monkeypatch, lambda: upload_and_publish(registry, owner, parcel))
    assert not upload_and_publish(registry, owner, parcel).created
    assert read_published_index(registry, owner).revision == 1


def test_changes_of_all_kinds_at_once_each_get_a_revision(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    first = template.make_package(key=alice)
    upload_and_publish(registry, owner, first)

    def keys() -> None:
        add_key(registry, owner, namespace="acme", public_key=bob.public.pem(), statement=None)

    def hide() -> None:
        yank_release(registry, owner, name=first.name, version="1.0.0", reason="bad")

    def more() -> None:
        upload_and_publish(registry, owner, template.make_package(version="1.1.0", key=alice))

    assert at_once(keys, hide, more) == [None, None, None]
    index = read_published_index(registry, owner)
    assert index.revision == 4
    assert [r.yanked for r in index.releases] == ["bad", None]
    assert len(index.keys) == 2
