"""Publishing: what is there afterwards, what is refused, and that nothing is there in between."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import select

from expertctl.digest import Digest, FileDigest
from expertctl.errors import (
    BudgetError,
    ConflictError,
    ForbiddenError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    SignatureError,
    StoreError,
    TrustError,
    UnauthenticatedError,
    UnsignedError,
)
from expertctl.package.layout import build_layout
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import ANONYMOUS, Action, Identity, TokenScope
from registry_server.database.tables import AUDIT, MANIFESTS, PACKAGES, RELEASES, SIGNED_FORMS, TAGS
from registry_server.errors import OciCode, OciError
from registry_server.publishing.releases import add_key, revoke_key, yank_release
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    publish_uploaded,
    pull_package,
    read_published_index,
    sign_with_other_key,
    upload_and_publish,
    upload_blobs,
)

PUBLISHED = (PACKAGES, RELEASES, SIGNED_FORMS, TAGS, MANIFESTS)


def rows(registry: Registry) -> dict[str, list[tuple[object, ...]]]:
    """All that a publish writes, downloads and blobs aside."""
    with registry.database.read() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table))]
            for table in (*PUBLISHED, AUDIT)
        }


def tag_of(registry: Registry, parcel: InMemoryPackage) -> str | None:
    with registry.database.read() as connection:
        return connection.execute(
            select(TAGS.c.digest).where(TAGS.c.name == parcel.version)
        ).scalar_one_or_none()


def trust_bob(registry: Registry, owner: Identity, bob: PrivateKey) -> None:
    add_key(registry, owner, namespace="acme", public_key=bob.public.pem(), statement=None)


def test_a_published_package_is_in_the_index_and_can_be_pulled(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(
        key=alice,
        description="Writes SQL.",
        composition={"requires": ["acme/base@^1"], "conflicts": ["acme/old"]},
    )
    published = upload_and_publish(registry, owner, parcel)
    assert published.created
    assert published.package_digest == parcel.package_digest
    index = read_published_index(registry, owner)
    [release] = index.releases
    assert (index.revision, index.description) == (1, "Writes SQL.")
    assert (str(release.version), release.yanked, release.kinds) == ("1.0.0", None, ("lora",))
    assert release.requires == ("acme/base@^1",)
    assert release.conflicts == ("acme/old",)
    assert release.size == sum(file.size for file in parcel.layout.files)
    [form] = release.forms
    assert form.package_digest == parcel.package_digest
    assert (form.signer, form.size) == (alice.public.key_id, len(parcel.layout.manifest))
    stated = json.loads(parcel.blobs[parcel.layout.files[-1].digest])["base"]
    assert (release.base.name, release.base.arch) == (stated["name"], stated["arch"])
    contents = pull_package(registry, parcel.name, parcel.package_digest)
    assert contents.content_digest == release.content_digest == parcel.content_digest
    assert tag_of(registry, parcel) == str(parcel.package_digest)


def test_a_publish_is_in_the_audit_log(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    with registry.database.read() as connection:
        row = connection.execute(select(AUDIT).where(AUDIT.c.action == "publish")).one()
    assert (row.actor, row.target, row.detail) == (
        "olga",
        "acme/sql@1.0.0",
        str(parcel.package_digest),
    )


def test_the_same_package_again_changes_nothing(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    before = rows(registry)
    again = upload_and_publish(registry, owner, parcel)
    assert not again.created
    assert again.package_digest == parcel.package_digest
    assert rows(registry) == before


def test_other_content_for_a_version_is_refused_and_changes_nothing(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    before = rows(registry)
    with pytest.raises(ConflictError, match="versions never change"):
        upload_and_publish(registry, owner, template.make_package(key=alice, description="changed"))
    assert rows(registry) == before


def test_a_re_sign_is_the_newest_form_and_the_old_one_stays_pullable(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    trust_bob(registry, owner, bob)
    old = template.make_package(key=alice)
    new = sign_with_other_key(old, bob)
    upload_and_publish(registry, owner, old)
    assert upload_and_publish(registry, owner, new).created
    index = read_published_index(registry, owner)
    assert index.revision == 2
    [release] = index.releases
    assert [f.package_digest for f in release.forms] == [old.package_digest, new.package_digest]
    assert tag_of(registry, new) == str(new.package_digest)
    for parcel in (old, new):
        found = pull_package(registry, parcel.name, parcel.package_digest)
        assert found.content_digest == old.content_digest


def test_an_older_form_again_does_not_undo_a_re_sign(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    trust_bob(registry, owner, bob)
    old = template.make_package(key=alice)
    new = sign_with_other_key(old, bob)
    upload_and_publish(registry, owner, old)
    upload_and_publish(registry, owner, new)
    assert not upload_and_publish(registry, owner, old).created
    assert tag_of(registry, old) == str(new.package_digest)


def test_an_older_form_counts_again_when_the_newest_key_was_revoked(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    trust_bob(registry, owner, bob)
    old = template.make_package(key=alice)
    new = sign_with_other_key(old, bob)
    upload_and_publish(registry, owner, old)
    upload_and_publish(registry, owner, new)
    revoke_key(registry, owner, namespace="acme", key_id=bob.public.key_id, reason="stolen")
    assert upload_and_publish(registry, owner, old).created
    [release] = read_published_index(registry, owner).releases
    assert [f.package_digest for f in release.forms] == [new.package_digest, old.package_digest]
    assert tag_of(registry, old) == str(old.package_digest)


def test_a_re_sign_of_a_yanked_version_stays_yanked(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    trust_bob(registry, owner, bob)
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    yank_release(registry, owner, name=parcel.name, version="1.0.0", reason="wrong data")
    upload_and_publish(registry, owner, sign_with_other_key(parcel, bob))
    assert [r.yanked for r in read_published_index(registry, owner).releases] == ["wrong data"]


def test_an_unsigned_package_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate
) -> None:
    with pytest.raises(UnsignedError):
        upload_and_publish(registry, owner, template.make_package(key=None))
    assert rows(registry)["packages"] == []


def test_a_key_that_is_not_of_the_namespace_is_refused_with_the_way_out(
    registry: Registry, owner: Identity, template: PackageTemplate, bob: PrivateKey
) -> None:
    with pytest.raises(TrustError, match="not a key of acme") as caught:
        upload_and_publish(registry, owner, template.make_package(key=bob))
    hint = "an owner adds it with `expertctl registry keys add KEY --namespace acme`"
    assert caught.value.hint == hint
    assert bob.public.key_id in caught.value.message


def test_a_revoked_key_is_refused_with_the_way_out(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    revoke_key(registry, owner, namespace="acme", key_id=alice.public.key_id, reason="lost laptop")
    for refused in (parcel, template.make_package(version="1.1.0", key=alice)):
        with pytest.raises(RevokedError, match="lost laptop") as caught:
            upload_and_publish(registry, owner, refused)
        assert "another key" in caught.value.hint
    assert [str(r.version) for r in read_published_index(registry, owner).releases] == ["1.0.0"]


def test_a_signature_over_other_files_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    signed = template.make_package(key=alice)
    other = template.make_package(key=alice, description="swapped")
    assert signed.layout.signature
    layout = build_layout(other.layout.files, signed.layout.signature)
    mixed = replace(other, layout=layout, blobs={**signed.blobs, **other.blobs})
    with pytest.raises(SignatureError, match="changed since it was signed"):
        upload_and_publish(registry, owner, mixed)


def test_a_signature_file_that_is_none_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    junk = b"not a bundle"
    signature = FileDigest("model.sig", len(junk), Digest.compute(junk))
    layout = build_layout(parcel.layout.files, signature)
    blobs = {**parcel.blobs, signature.digest: junk}
    with pytest.raises(SignatureError):
        upload_and_publish(registry, owner, replace(parcel, layout=layout, blobs=blobs))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"name": "acme/other"}, "acme/other@1.0.0"),
        ({"name": "evil/sql"}, "evil/sql@1.0.0"),
        ({"version": "2.0.0"}, "acme/sql@2.0.0"),
    ],
)
def test_a_package_pushed_under_another_name_or_version_is_refused(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    stated: dict[str, str],
    said: str,
) -> None:
    with pytest.raises(InvalidPackageError, match=f"says {said}"):
        upload_and_publish(registry, owner, template.make_package(key=alice, stated=stated))
    assert rows(registry)["packages"] == []


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("adapter_model.safetensors", b"\x80\x04pickle"),
        ("adapter_config.json", b"{}"),
        ("notes.txt", b"nobody named this"),
    ],
)
def test_a_package_that_the_client_would_refuse_is_refused(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    path: str,
    data: bytes,
) -> None:
    with pytest.raises(InvalidPackageError):
        upload_and_publish(registry, owner, template.make_package(key=alice, files={path: data}))
    assert rows(registry)["packages"] == []


def test_every_blob_must_be_in_the_repository(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    for digest in parcel.blobs:
        rest = {d: data for d, data in parcel.blobs.items() if d != digest}
        lacking = template.make_package(f"acme/lacks-{digest.hex[:8]}", key=alice)
        upload_blobs(registry, replace(parcel, name=lacking.name, blobs=rest))
        with pytest.raises(OciError, match="1 of its blobs") as caught:
            publish_uploaded(registry, owner, replace(parcel, name=lacking.name))
        assert caught.value.oci_code is OciCode.MANIFEST_BLOB_UNKNOWN
        assert str(digest) in caught.value.message


def test_blobs_of_another_repository_do_not_count(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(
        registry, replace(parcel, name=template.make_package("acme/other", key=alice).name)
    )
    with pytest.raises(OciError, match="blobs are not in acme/sql"):
        publish_uploaded(registry, owner, parcel)


def test_a_manifest_that_lies_about_a_size_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    first, *others = parcel.layout.files
    lie = build_layout([replace(first, size=first.size + 1), *others], parcel.layout.signature)
    with pytest.raises(InvalidPackageError, match=f"has {first.size} bytes"):
        upload_and_publish(registry, owner, replace(parcel, layout=lie))


@pytest.mark.parametrize("name", ["acme/sq1", "acme/sq-l", "acme/sqi"])
def test_a_name_that_looks_like_another_of_the_namespace_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey, name: str
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    with pytest.raises(ConflictError, match="looks like acme/sql"):
        upload_and_publish(registry, owner, template.make_package(name, key=alice))


def test_the_same_name_in_another_namespace_is_no_look_alike(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    served.create_namespace("corp", kind="expert", owner="olga")
    add_key(registry, owner, namespace="corp", public_key=alice.public.pem(), statement=None)
    both = [template.make_package(key=alice), template.make_package("corp/sql", key=alice)]
    assert [upload_and_publish(registry, owner, parcel).created for parcel in both] == [True, True]
    with registry.database.read() as connection:
        tagged = connection.execute(select(TAGS.c.digest).order_by(TAGS.c.repository_id)).scalars()
        assert list(tagged) == [str(parcel.package_digest) for parcel in both]


def test_a_key_of_one_namespace_does_not_sign_for_another(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    served.create_namespace("corp", kind="expert", owner="olga")
    with pytest.raises(TrustError, match="not a key of corp"):
        upload_and_publish(registry, owner, template.make_package("corp/sql", key=alice))


def test_a_version_that_differs_in_case_alone_is_refused(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_and_publish(registry, owner, template.make_package(version="1.0.0-rc.1", key=alice))
    with pytest.raises(ConflictError, match="in case alone"):
        upload_and_publish(registry, owner, template.make_package(version="1.0.0-RC.1", key=alice))


def test_who_may_not_push_is_refused_before_anything_is_read(
    served: RegistryHarness, registry: Registry, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    served.create_user("eve")
    stranger = served.authenticate(served.create_token("eve"))
    reader = served.authenticate(served.create_token("olga", TokenScope(Action.READ)))
    elsewhere = served.authenticate(
        served.create_token("olga", TokenScope(Action.PUSH, "acme", "other"))
    )
    with pytest.raises(UnauthenticatedError):
        publish_uploaded(registry, ANONYMOUS, parcel)
    for identity in (stranger, reader, elsewhere):
        with pytest.raises(ForbiddenError):
            upload_and_publish(registry, identity, parcel)


def test_a_publisher_may_publish(
    served: RegistryHarness, registry: Registry, template: PackageTemplate, alice: PrivateKey
) -> None:
    secret = served.create_user("pat")
    served.create_namespace("team", kind="expert", owner="olga", publisher="pat")
    owner = served.authenticate(served.create_token("olga"))
    add_key(registry, owner, namespace="team", public_key=alice.public.pem(), statement=None)
    parcel = template.make_package("team/sql", key=alice)
    assert upload_and_publish(registry, served.authenticate(secret), parcel).created
    assert tag_of(registry, parcel) == str(parcel.package_digest)


def test_a_namespace_of_plain_oci_takes_no_packages(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    served.create_namespace("plain", kind="oci", owner="olga")
    with pytest.raises(OciError, match="not a namespace for packages"):
        upload_and_publish(registry, owner, template.make_package("plain/sql", key=alice))


def test_a_namespace_that_is_not_there_takes_no_packages(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    with pytest.raises(NotFoundError, match="no namespace"):
        publish_uploaded(registry, owner, template.make_package("nowhere/sql", key=alice))


def test_the_manifest_counts_against_the_quota(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    parcel = template.make_package("tight/sql", key=alice)
    room = sum(map(len, parcel.blobs.values())) + len(parcel.layout.manifest)
    for name, quota in (("tight", room - 1), ("snug", room)):
        served.create_namespace(name, kind="expert", owner="olga", quota=quota)
        add_key(registry, owner, namespace=name, public_key=alice.public.pem(), statement=None)
    with pytest.raises(BudgetError, match="do not fit"):
        upload_and_publish(registry, owner, parcel)
    assert rows(registry)["packages"] == []
    fitting = template.make_package("snug/sql", key=alice, stated={})
    assert upload_and_publish(registry, owner, fitting).created


@pytest.mark.parametrize("path", ["adapter_model.safetensors", "expert.json", "model.sig"])
def test_a_blob_that_the_disk_lost_or_changed_is_not_published(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey, path: str
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    [file] = [f for f in parcel.layout.layers if f.path == path]
    lying = registry.storage.path(file.digest)
    lying.write_bytes(lying.read_bytes()[::-1])
    with pytest.raises(StoreError, match="storage is damaged") as caught:
        publish_uploaded(registry, owner, parcel)
    assert "disk" in caught.value.hint
    lying.unlink()
    with pytest.raises(StoreError, match="storage is damaged"):
        publish_uploaded(registry, owner, parcel)
    assert rows(registry)["packages"] == []


def test_a_document_that_no_client_could_read_is_not_written(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    before = rows(registry)
    monkeypatch.setattr("expertctl.registry.index_document.MAX_BYTES", 1000)
    with pytest.raises(BudgetError, match="too large"):
        upload_and_publish(registry, owner, template.make_package(version="1.1.0", key=alice))
    assert rows(registry) == before


def test_what_was_published_is_there_after_a_restart(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    before = read_published_index(registry, owner)
    again = served.reopen()
    try:
        assert read_published_index(again.registry, owner) == before
        pull_package(again.registry, parcel.name, parcel.package_digest)
        again.registry.check_integrity()
    finally:
        again.close()


@pytest.mark.parametrize("name", ["README.md", "LICENSE"])
@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n", "holds a private key"),
        (b"log in with xpt_" + b"A" * 43 + b" first", "holds an access token"),
    ],
)
@pytest.mark.parametrize("padding", [0, 3 << 20])
def test_attack_100_a_secret_that_any_client_pushes_in_a_document_is_refused(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    name: str,
    secret: bytes,
    problem: str,
    padding: int,
) -> None:
    """A large document is read to its end, too."""
    document = b"# SQL\n" + b"x" * padding + b" " + secret
    before = rows(registry)
    with pytest.raises(InvalidPackageError, match=f"{name}: {problem}"):
        upload_and_publish(
            registry, owner, template.make_package(key=alice, files={name: document})
        )
    assert rows(registry) == before


@pytest.mark.parametrize(
    "document", [b"caf\xe9", "café".encode("utf-16"), b"x" * (2 << 20) + b"\xe2\x82"]
)
def test_a_readme_that_is_not_utf_8_is_refused(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    document: bytes,
) -> None:
    with pytest.raises(InvalidPackageError, match=r"README\.md: not UTF-8"):
        upload_and_publish(
            registry, owner, template.make_package(key=alice, files={"README.md": document})
        )


def test_a_readme_in_any_script_is_published(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    document = "日本語 🇫🇷 café".encode() * 100_000  # characters lie across the pieces read
    parcel = template.make_package(key=alice, files={"README.md": document})
    assert upload_and_publish(registry, owner, parcel).created


def test_a_certificate_or_a_public_key_in_a_readme_is_no_secret(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    document = alice.public.pem() + b"-----BEGIN CERTIFICATE-----\nxpt_short\n"
    assert upload_and_publish(
        registry, owner, template.make_package(key=alice, files={"README.md": document})
    ).created
