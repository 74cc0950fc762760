"""Publishing against the real server on a real socket."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import (
    BudgetError,
    ConflictError,
    DigestError,
    ExpertError,
    ForbiddenError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.package.layout import CONFIG
from expertctl.package.spool import sign_package, spooling, with_document
from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import CredentialStore
from expertctl.registry.http import Http
from expertctl.registry.index_envelope import open_index
from expertctl.registry.oci_client import OciClient
from expertctl.registry.package_pages import package_page
from expertctl.registry.people import add_key, namespace, revoke_key
from expertctl.registry.publish import (
    Destination,
    in_order,
    plan_shipment,
    read_parcel,
    send,
)
from expertctl.settings import Home
from expertctl.trust.keys import PrivateKey
from expertctl.trust.policy import TrustStore
from tests.package.forge import files_of, framed, repack, tar_of
from tests.registry.live import Live
from tests.registry.publishing_world import (
    Workshop,
    admin,
    alice,
    destination,
    live,
    log_in,
    tiny_base,
    trust,
    workshop,
)

__all__ = ["admin", "alice", "destination", "live", "tiny_base", "trust", "workshop"]


def publish(path: Path, trust: TrustStore, to: Destination) -> str:
    """Publish a file and return what the registry had of it before."""
    shipment = plan_shipment(read_parcel(path, trust), to)
    send(shipment, to)
    return shipment.state


def test_a_published_package_is_there_with_its_bytes(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    parcel = read_parcel(workshop.package(), trust)
    shipment = plan_shipment(parcel, destination)
    assert (shipment.state, shipment.missing) == ("new", parcel.blobs)
    send(shipment, destination)
    manifest = destination.oci.manifest("acme/sql", "1.0.0")
    assert manifest.data == parcel.contents.layout.manifest
    for digest, size in parcel.blobs:
        with destination.oci.blob("acme/sql", digest) as answer:
            data = b"".join(answer.chunks)
        assert (len(data), Digest.of(data)) == (size, digest)


def test_the_index_says_what_was_published(
    live: Live, workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    path = workshop.package()
    parcel = read_parcel(path, trust)
    assert publish(path, trust, destination) == "new"
    client = live.served.client(live.served.token("alice"))
    envelope = client.get("/tuf/targets/index/acme/sql.json").content
    index = open_index(envelope, key=live.served.registry.index_key.public, package=parcel.package)
    (release,) = index.releases
    assert str(release.version) == "1.0.0"
    assert release.content_digest == parcel.contents.content_digest
    assert release.forms[-1].package_digest == parcel.contents.package_digest


def test_publishing_the_same_again_sends_nothing(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    path = workshop.package()
    assert publish(path, trust, destination) == "new"
    shipment = plan_shipment(read_parcel(path, trust), destination)
    assert (shipment.state, shipment.missing, shipment.size) == ("published", (), 0)
    send(shipment, destination)


def test_only_what_is_missing_travels(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    first, second = workshop.package(version="1.0.0"), workshop.package(version="1.0.1")
    publish(first, trust, destination)
    shipment = plan_shipment(read_parcel(second, trust), destination)
    names = {f.digest: f.path for f in shipment.parcel.contents.layout.layers}
    assert {names[digest] for digest, _ in shipment.missing} == {"expert.json", "model.sig"}
    send(shipment, destination)
    versions = package_page(destination.api, shipment.parcel.package).versions  # type: ignore[arg-type]
    assert {release.version for release in versions} == {"1.0.0", "1.0.1"}


def test_another_content_of_a_version_is_refused_before_a_byte_travels(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    publish(workshop.package(), trust, destination)
    other = workshop.package(output=workshop.folder / "other.expert", lora={"seed": 7})
    with pytest.raises(ConflictError, match="other content") as caught:
        plan_shipment(read_parcel(other, trust), destination)
    assert "never changes" in caught.value.hint


def test_another_content_that_won_a_race_is_refused_by_the_registry(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    late = workshop.package(output=workshop.folder / "late.expert", lora={"seed": 7})
    shipment = plan_shipment(read_parcel(late, trust), destination)
    publish(workshop.package(), trust, destination)
    with pytest.raises(ConflictError):
        send(shipment, destination)
    manifest = destination.oci.manifest("acme/sql", "1.0.0").data
    assert manifest == read_parcel(workshop.package(), trust).contents.layout.manifest


def test_the_same_content_signed_anew_is_published_beside(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    path = workshop.package()
    publish(path, trust, destination)
    before = destination.oci.manifest("acme/sql", "1.0.0")
    other = PrivateKey.generate()
    trust.add(other.public, name="other", namespaces=["acme"])

    assert destination.api is not None
    add_key(destination.api, "acme", other.public, by=workshop.key)
    sign_package(path, other)
    assert publish(path, trust, destination) == "signed anew"
    after = destination.oci.manifest("acme/sql", "1.0.0")
    assert after.digest != before.digest
    assert destination.oci.manifest("acme/sql", before.digest).data == before.data


def test_an_unsigned_package_is_refused_here(workshop: Workshop, trust: TrustStore) -> None:
    with pytest.raises(UnsignedError) as caught:
        read_parcel(workshop.package(key=None), trust)
    assert "expertctl sign" in caught.value.hint


def test_a_package_that_is_not_trusted_here_is_refused_here(
    workshop: Workshop, trust: TrustStore
) -> None:
    with pytest.raises(TrustError):
        read_parcel(workshop.package(key=PrivateKey.generate()), trust)


SECRETS = {
    "a private key": b"-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----",
    "an access token": b"xpt_" + b"A" * 43,
}


@pytest.mark.parametrize("what", SECRETS)
def test_attack_100_a_secret_in_a_package_is_not_published(
    what: str, workshop: Workshop, trust: TrustStore
) -> None:
    """Our own build would refuse it; another tool's does not."""
    path = workshop.package()
    files = files_of(tar_of(path))
    framed(repack({**files, "README.md": b"# SQL\n" + SECRETS[what]}), path)
    sign_package(path, workshop.key)
    with pytest.raises(InvalidPackageError, match=f"README.md: holds {what}"):
        read_parcel(path, trust)


def test_a_namespace_that_is_not_there_names_the_command_that_makes_it(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    trust.add(workshop.key.public, name="me", namespaces=["other"])
    parcel = read_parcel(workshop.package("other/sql"), trust)
    with pytest.raises(NotFoundError, match="no namespace 'other'") as caught:
        plan_shipment(parcel, destination)
    assert "expertctl registry namespace add other" in caught.value.hint


def test_a_key_that_is_not_registered_names_the_command_that_does_it(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    other = PrivateKey.generate()
    trust.add(other.public, name="other", namespaces=["acme"])
    parcel = read_parcel(workshop.package(key=other), trust)
    with pytest.raises(TrustError, match=re.escape(other.public.key_id)) as caught:
        plan_shipment(parcel, destination)
    assert "expertctl registry keys add" in caught.value.hint


def test_a_revoked_key_publishes_nothing(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    assert destination.api is not None
    revoke_key(destination.api, "acme", workshop.key.public.key_id, reason="stolen")
    parcel = read_parcel(workshop.package(), trust)
    with pytest.raises(RevokedError):
        plan_shipment(parcel, destination)


def test_a_reader_does_not_publish(
    live: Live, home: Path, workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    shipment = plan_shipment(read_parcel(workshop.package(), trust), destination)
    log_in(live, home, live.served.user("bob"))
    with Http(CredentialStore(Home(home).credentials)) as http:
        oci = OciClient(http, RegistryAddress.parse(live.url))
        with pytest.raises(ForbiddenError):
            send(shipment, Destination(oci, None, home))


def test_what_does_not_fit_is_refused_and_leaves_nothing_published(
    live: Live, workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    live.served.namespace("small", kind="expert", owner="alice", quota=1000)
    assert destination.api is not None

    add_key(destination.api, "small", workshop.key.public, by=None)
    trust.add(workshop.key.public, name="me", namespaces=["small"])
    shipment = plan_shipment(read_parcel(workshop.package("small/sql"), trust), destination)
    assert shipment.left == 1000
    with pytest.raises(BudgetError):
        send(shipment, destination)
    with pytest.raises(NotFoundError):
        destination.oci.manifest("small/sql", "1.0.0")


def test_what_arrived_before_it_broke_off_is_not_sent_again(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    parcel = read_parcel(workshop.package(), trust)
    shipment = plan_shipment(parcel, destination)
    half = replace(shipment, missing=shipment.missing[:3])
    with pytest.raises(ExpertError):
        send(half, destination)
    again = plan_shipment(parcel, destination)
    assert set(again.missing) == set(shipment.missing[3:])
    send(again, destination)


def test_the_manifest_goes_last(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    """As long as it has not gone, nobody sees the version."""
    shipment = plan_shipment(read_parcel(workshop.package(), trust), destination)
    for digest, size in shipment.missing[:-1]:
        with pytest.raises(NotFoundError):
            destination.oci.manifest("acme/sql", "1.0.0")
        send_one(destination, shipment.parcel.path, digest, size)
    assert destination.oci.manifest_digest("acme/sql", "1.0.0") is None


def send_one(to: Destination, path: Path, digest: Digest, size: int) -> None:

    with spooling(path, beside=path) as (_, spool):
        blobs = with_document(spool.blob, CONFIG)
        to.oci.upload("acme/sql", digest, size, lambda: blobs(digest))


def test_a_file_that_changes_meanwhile_is_not_published(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    path = workshop.package()
    shipment = plan_shipment(read_parcel(path, trust), destination)
    workshop.package(version="2.0.0", output=path)
    with pytest.raises(DigestError, match="changed while"):
        send(shipment, destination)


def test_progress_counts_what_travels(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    shipment = plan_shipment(read_parcel(workshop.package(), trust), destination)
    counts: list[int] = []
    send(shipment, destination, progress=counts.append)
    assert sum(counts) == shipment.size


def test_no_spooled_file_stays(
    home: Path, workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    publish(workshop.package(), trust, destination)
    left = [p for p in Home(home).registries.rglob("*") if p.is_file()]
    assert left == []


def test_several_go_in_the_order_of_what_they_require(
    workshop: Workshop, trust: TrustStore
) -> None:
    top = workshop.package("acme/top", composition={"requires": ["acme/middle@^1"]})
    middle = workshop.package("acme/middle", composition={"requires": ["acme/bottom"]})
    bottom = workshop.package("acme/bottom")
    parcels = [read_parcel(path, trust) for path in (top, middle, bottom)]
    assert [p.ref for p in in_order(parcels)] == [
        "acme/bottom@1.0.0",
        "acme/middle@1.0.0",
        "acme/top@1.0.0",
    ]


def test_a_circle_of_requirements_is_named(workshop: Workshop, trust: TrustStore) -> None:
    one = workshop.package("acme/one", composition={"requires": ["acme/two"]})
    two = workshop.package("acme/two", composition={"requires": ["acme/one"]})
    with pytest.raises(UsageError, match="require each other"):
        in_order([read_parcel(path, trust) for path in (one, two)])


def test_one_version_twice_is_refused(workshop: Workshop, trust: TrustStore) -> None:
    parcel = read_parcel(workshop.package(), trust)
    with pytest.raises(UsageError, match="same version"):
        in_order([parcel, parcel])


def test_a_package_that_requires_itself_by_another_version_is_no_circle(
    workshop: Workshop, trust: TrustStore
) -> None:
    old, new = workshop.package(version="1.0.0"), workshop.package(version="2.0.0")
    assert len(in_order([read_parcel(path, trust) for path in (new, old)])) == 2


def test_the_room_of_a_namespace_is_told(
    workshop: Workshop, trust: TrustStore, destination: Destination
) -> None:
    publish(workshop.package(), trust, destination)
    assert destination.api is not None
    used = namespace(destination.api, "acme").used
    shipment = plan_shipment(read_parcel(workshop.package(version="2.0.0"), trust), destination)
    assert shipment.room is not None
    assert shipment.room.used == used > 0
