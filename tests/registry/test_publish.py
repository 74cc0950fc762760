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
from expertctl.package.write import add_document, sign_package, spool_package
from expertctl.registry.accounts import add_key, fetch_namespace, revoke_key
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import OciClient, fetch_package
from expertctl.registry.credentials import CredentialStore
from expertctl.registry.http import RegistryHttp
from expertctl.registry.index_document import open_index
from expertctl.registry.publish import (
    PublishPackage,
    PublishTarget,
    examine_publish_package,
    plan_upload,
    publish_package,
    sort_by_requirements,
)
from expertctl.settings import Home
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.package.forged_packages import (
    make_package_archive,
    read_archive,
    read_packed_files,
    write_frame,
)
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    admin,
    alice,
    destination,
    live,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["admin", "alice", "destination", "live", "tiny_base", "trust", "workspace"]


def read_publish_package(path: Path, trust: TrustStore) -> PublishPackage:
    """Read a file that may be published, or raise the first reason against it."""
    parcel, problems = examine_publish_package(path, trust)
    for problem in problems:
        raise problem
    return parcel


def publish(path: Path, trust: TrustStore, to: PublishTarget) -> str:
    """Publish a file and return what the registry had of it before."""
    shipment = plan_upload(read_publish_package(path, trust), to)
    publish_package(shipment, to)
    return shipment.state


def test_a_published_package_is_there_with_its_bytes(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    parcel = read_publish_package(workspace.package(), trust)
    shipment = plan_upload(parcel, destination)
    assert (shipment.state, shipment.missing) == ("new", parcel.blobs)
    publish_package(shipment, destination)
    manifest = destination.oci.fetch_manifest("acme/sql", "1.0.0")
    assert manifest.data == parcel.contents.layout.manifest
    for digest, size in parcel.blobs:
        with destination.oci.open_blob("acme/sql", digest) as answer:
            data = b"".join(answer.chunks)
        assert (len(data), Digest.compute(data)) == (size, digest)


def test_the_index_says_what_was_published(
    live: LiveRegistry, workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    path = workspace.package()
    parcel = read_publish_package(path, trust)
    assert publish(path, trust, destination) == "new"
    client = live.served.client(live.served.create_token("alice"))
    envelope = client.get("/tuf/targets/index/acme/sql.json").content
    index = open_index(envelope, key=live.served.registry.index_key.public, package=parcel.package)
    (release,) = index.releases
    assert str(release.version) == "1.0.0"
    assert release.content_digest == parcel.contents.content_digest
    assert release.forms[-1].package_digest == parcel.contents.package_digest


def test_publishing_the_same_again_sends_nothing(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    path = workspace.package()
    assert publish(path, trust, destination) == "new"
    shipment = plan_upload(read_publish_package(path, trust), destination)
    assert (shipment.state, shipment.missing, shipment.size) == ("published", (), 0)
    publish_package(shipment, destination)


def test_only_what_is_missing_travels(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    first, second = workspace.package(version="1.0.0"), workspace.package(version="1.0.1")
    publish(first, trust, destination)
    shipment = plan_upload(read_publish_package(second, trust), destination)
    names = {f.digest: f.path for f in shipment.source.contents.layout.layers}
    assert {names[digest] for digest, _ in shipment.missing} == {"expert.json", "model.sig"}
    publish_package(shipment, destination)
    versions = fetch_package(destination.api, shipment.source.package).versions  # type: ignore[arg-type]
    assert {release.version for release in versions} == {"1.0.0", "1.0.1"}


def test_another_content_of_a_version_is_refused_before_a_byte_travels(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    publish(workspace.package(), trust, destination)
    other = workspace.package(output=workspace.folder / "other.expert", lora={"seed": 7})
    with pytest.raises(ConflictError, match="other content") as caught:
        plan_upload(read_publish_package(other, trust), destination)
    assert "never changes" in caught.value.hint


def test_another_content_that_won_a_race_is_refused_by_the_registry(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    late = workspace.package(output=workspace.folder / "late.expert", lora={"seed": 7})
    shipment = plan_upload(read_publish_package(late, trust), destination)
    publish(workspace.package(), trust, destination)
    with pytest.raises(ConflictError):
        publish_package(shipment, destination)
    manifest = destination.oci.fetch_manifest("acme/sql", "1.0.0").data
    assert manifest == read_publish_package(workspace.package(), trust).contents.layout.manifest


def test_the_same_content_signed_anew_is_published_beside(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    path = workspace.package()
    publish(path, trust, destination)
    before = destination.oci.fetch_manifest("acme/sql", "1.0.0")
    other = PrivateKey.generate()
    trust.add(other.public, name="other", namespaces=["acme"])

    assert destination.api is not None
    add_key(destination.api, "acme", other.public, by=workspace.key)
    sign_package(path, other)
    assert publish(path, trust, destination) == "signed anew"
    after = destination.oci.fetch_manifest("acme/sql", "1.0.0")
    assert after.digest != before.digest
    assert destination.oci.fetch_manifest("acme/sql", before.digest).data == before.data


def test_an_unsigned_package_is_refused_here(
    workspace: PackageWorkspace, trust: TrustStore
) -> None:
    with pytest.raises(UnsignedError) as caught:
        read_publish_package(workspace.package(key=None), trust)
    assert "expertctl sign" in caught.value.hint


def test_a_package_that_is_not_trusted_here_is_refused_here(
    workspace: PackageWorkspace, trust: TrustStore
) -> None:
    with pytest.raises(TrustError):
        read_publish_package(workspace.package(key=PrivateKey.generate()), trust)


SECRETS = {
    "a private key": b"-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----",
    "an access token": b"xpt_" + b"A" * 43,
}


@pytest.mark.parametrize("what", SECRETS)
def test_attack_100_a_secret_in_a_package_is_not_published(
    what: str, workspace: PackageWorkspace, trust: TrustStore
) -> None:
    """Our own build would refuse it; another tool's does not."""
    path = workspace.package()
    files = read_packed_files(read_archive(path))
    write_frame(make_package_archive({**files, "README.md": b"# SQL\n" + SECRETS[what]}), path)
    sign_package(path, workspace.key)
    with pytest.raises(InvalidPackageError, match=f"README.md: holds {what}"):
        read_publish_package(path, trust)


def test_a_namespace_that_is_not_there_names_the_command_that_makes_it(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    trust.add(workspace.key.public, name="me", namespaces=["other"])
    parcel = read_publish_package(workspace.package("other/sql"), trust)
    with pytest.raises(NotFoundError, match="no namespace 'other'") as caught:
        plan_upload(parcel, destination)
    assert "expertctl registry namespace add other" in caught.value.hint


def test_a_key_that_is_not_registered_names_the_command_that_does_it(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    other = PrivateKey.generate()
    trust.add(other.public, name="other", namespaces=["acme"])
    parcel = read_publish_package(workspace.package(key=other), trust)
    with pytest.raises(TrustError, match=re.escape(other.public.key_id)) as caught:
        plan_upload(parcel, destination)
    assert "expertctl registry keys add" in caught.value.hint


def test_a_revoked_key_publishes_nothing(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    assert destination.api is not None
    revoke_key(destination.api, "acme", workspace.key.public.key_id, reason="stolen")
    parcel = read_publish_package(workspace.package(), trust)
    with pytest.raises(RevokedError):
        plan_upload(parcel, destination)


def test_a_reader_does_not_publish(
    live: LiveRegistry,
    home: Path,
    workspace: PackageWorkspace,
    trust: TrustStore,
    destination: PublishTarget,
) -> None:
    shipment = plan_upload(read_publish_package(workspace.package(), trust), destination)
    store_credential(live, home, live.served.create_user("bob"))
    with RegistryHttp(CredentialStore(Home(home).credentials)) as http:
        oci = OciClient(http, RegistryAddress.parse(live.url))
        with pytest.raises(ForbiddenError):
            publish_package(shipment, PublishTarget(oci, None, home))


def test_what_does_not_fit_is_refused_and_leaves_nothing_published(
    live: LiveRegistry, workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    live.served.create_namespace("small", kind="expert", owner="alice", quota=1000)
    assert destination.api is not None

    add_key(destination.api, "small", workspace.key.public, by=None)
    trust.add(workspace.key.public, name="me", namespaces=["small"])
    shipment = plan_upload(read_publish_package(workspace.package("small/sql"), trust), destination)
    assert shipment.remaining_quota == 1000
    with pytest.raises(BudgetError):
        publish_package(shipment, destination)
    with pytest.raises(NotFoundError):
        destination.oci.fetch_manifest("small/sql", "1.0.0")


def test_what_arrived_before_it_broke_off_is_not_sent_again(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    parcel = read_publish_package(workspace.package(), trust)
    shipment = plan_upload(parcel, destination)
    half = replace(shipment, missing=shipment.missing[:3])
    with pytest.raises(ExpertError):
        publish_package(half, destination)
    again = plan_upload(parcel, destination)
    assert set(again.missing) == set(shipment.missing[3:])
    publish_package(again, destination)


def test_the_manifest_goes_last(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    """As long as it has not gone, nobody sees the version."""
    shipment = plan_upload(read_publish_package(workspace.package(), trust), destination)
    for digest, size in shipment.missing[:-1]:
        with pytest.raises(NotFoundError):
            destination.oci.fetch_manifest("acme/sql", "1.0.0")
        send_one(destination, shipment.source.path, digest, size)
    assert destination.oci.fetch_manifest_digest("acme/sql", "1.0.0") is None


def send_one(to: PublishTarget, path: Path, digest: Digest, size: int) -> None:

    with spool_package(path, target=path) as (_, spool):
        blobs = add_document(spool.blob, CONFIG)
        to.oci.upload_blob("acme/sql", digest, size, lambda: blobs(digest))


def test_a_file_that_changes_meanwhile_is_not_published(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    path = workspace.package()
    shipment = plan_upload(read_publish_package(path, trust), destination)
    workspace.package(version="2.0.0", output=path)
    with pytest.raises(DigestError, match="changed while"):
        publish_package(shipment, destination)


def test_progress_counts_what_travels(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    shipment = plan_upload(read_publish_package(workspace.package(), trust), destination)
    counts: list[int] = []
    publish_package(shipment, destination, progress=counts.append)
    assert sum(counts) == shipment.size


def test_no_spooled_file_stays(
    home: Path, workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    publish(workspace.package(), trust, destination)
    left = [p for p in Home(home).registries.rglob("*") if p.is_file()]
    assert left == []


def test_several_go_in_the_order_of_what_they_require(
    workspace: PackageWorkspace, trust: TrustStore
) -> None:
    top = workspace.package("acme/top", composition={"requires": ["acme/middle@^1"]})
    middle = workspace.package("acme/middle", composition={"requires": ["acme/bottom"]})
    bottom = workspace.package("acme/bottom")
    parcels = [read_publish_package(path, trust) for path in (top, middle, bottom)]
    assert [p.ref for p in sort_by_requirements(parcels)] == [
        "acme/bottom@1.0.0",
        "acme/middle@1.0.0",
        "acme/top@1.0.0",
    ]


def test_a_circle_of_requirements_is_named(workspace: PackageWorkspace, trust: TrustStore) -> None:
    one = workspace.package("acme/one", composition={"requires": ["acme/two"]})
    two = workspace.package("acme/two", composition={"requires": ["acme/one"]})
    with pytest.raises(UsageError, match="require each other"):
        sort_by_requirements([read_publish_package(path, trust) for path in (one, two)])


def test_one_version_twice_is_refused(workspace: PackageWorkspace, trust: TrustStore) -> None:
    parcel = read_publish_package(workspace.package(), trust)
    with pytest.raises(UsageError, match="same version"):
        sort_by_requirements([parcel, parcel])


def test_a_package_that_requires_itself_by_another_version_is_no_circle(
    workspace: PackageWorkspace, trust: TrustStore
) -> None:
    old, new = workspace.package(version="1.0.0"), workspace.package(version="2.0.0")
    assert (
        len(sort_by_requirements([read_publish_package(path, trust) for path in (new, old)])) == 2
    )


def test_the_room_of_a_namespace_is_told(
    workspace: PackageWorkspace, trust: TrustStore, destination: PublishTarget
) -> None:
    publish(workspace.package(), trust, destination)
    assert destination.api is not None
    used = fetch_namespace(destination.api, "acme").used
    shipment = plan_upload(
        read_publish_package(workspace.package(version="2.0.0"), trust), destination
    )
    assert shipment.namespace is not None
    assert shipment.namespace.used == used > 0
