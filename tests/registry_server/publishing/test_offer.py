"""What can be refused before anything else is looked at."""

import pytest

from expertctl.errors import InvalidPackageError, UnsignedError, UsageError
from expertctl.package.layout import CONFIG, build_layout
from expertctl.reference import Digest, FileDigest
from expertctl.trust.bundle import MAX_BUNDLE
from expertctl.trust.keys import PrivateKey
from registry_server.publishing.push import parse_push_request
from tests.registry_server.publishing.package_fixtures import PackageTemplate


def test_an_offer_names_every_blob_that_must_be_there(
    template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    offer = parse_push_request(name=parcel.name, tag="1.0.0", manifest=parcel.layout.manifest)
    assert offer.blobs == {str(digest): len(data) for digest, data in parcel.blobs.items()}
    assert str(Digest.compute(CONFIG)) in offer.blobs
    assert offer.package_digest == parcel.package_digest
    assert offer.content_digest == parcel.content_digest


def test_an_unsigned_package_is_refused_with_the_way_out(template: PackageTemplate) -> None:
    parcel = template.make_package(key=None)
    with pytest.raises(UnsignedError, match="signed packages only") as caught:
        parse_push_request(name=parcel.name, tag="1.0.0", manifest=parcel.layout.manifest)
    assert "expertctl sign" in caught.value.hint


def test_a_tag_that_is_no_version_is_refused(template: PackageTemplate, alice: PrivateKey) -> None:
    parcel = template.make_package(key=alice)
    with pytest.raises(UsageError, match="not a version"):
        parse_push_request(name=parcel.name, tag="latest", manifest=parcel.layout.manifest)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{", b"{ "),
        (b'"schemaVersion":2', b'"schemaVersion":2,"annotations":{}'),
        (b"vnd.cncf.model.manifest", b"vnd.example.manifest"),
        (b"adapter_config.json", b"..%2fadapter.json.."),
    ],
)
def test_a_manifest_that_is_not_exactly_that_of_a_package_is_refused(
    template: PackageTemplate, alice: PrivateKey, before: bytes, after: bytes
) -> None:
    parcel = template.make_package(key=alice)
    manifest = parcel.layout.manifest.replace(before, after, 1)
    assert manifest != parcel.layout.manifest
    with pytest.raises(InvalidPackageError):
        parse_push_request(name=parcel.name, tag="1.0.0", manifest=manifest)


def test_a_signature_file_that_is_too_large_is_refused_unread(
    template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    large = FileDigest("model.sig", MAX_BUNDLE + 1, Digest.compute(b""))
    manifest = build_layout(parcel.layout.files, large).manifest
    with pytest.raises(UsageError, match="too large"):
        parse_push_request(name=parcel.name, tag="1.0.0", manifest=manifest)
