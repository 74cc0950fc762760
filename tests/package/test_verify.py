"""Trust: which packages become a `VerifiedPackage`, and which never do."""

import shutil
from pathlib import Path

import pytest

from expertctl.errors import (
    DigestError,
    InvalidPackageError,
    RevokedError,
    SignatureError,
    TrustError,
    UnsignedError,
)
from expertctl.package.read import PackageContents, accept_unsigned, read_package, verify_contents
from expertctl.package.write import sign_package
from expertctl.reference import Reference
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.package.forged_packages import (
    edit_json_file,
    make_package_archive,
    read_archive,
    read_packed_files,
    write_frame,
)


@pytest.fixture
def trust(tmp_path: Path, key: PrivateKey) -> TrustStore:
    store = TrustStore(tmp_path / "trust" / "trust.json")
    store.add(key.public, name="acme", namespaces=["acme"])
    return store


@pytest.fixture
def nobody(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "nobody" / "trust.json")


def test_a_package_of_a_trusted_key_is_verified(
    package: Path, trust: TrustStore, key: PrivateKey
) -> None:
    verified = verify_contents(read_package(package), trust)
    assert verified.signer == key.public.key_id
    assert verified.contents == read_package(package)


@pytest.mark.parametrize("text", ["acme/sql", "acme/sql@1.0.0", "acme/sql@^1", "acme/sql@>=0.9"])
def test_the_package_that_was_asked_for_is_verified(
    text: str, package: Path, trust: TrustStore
) -> None:
    assert verify_contents(
        read_package(package), trust, expected=Reference.parse(text)
    ) == verify_contents(read_package(package), trust)


@pytest.mark.parametrize("text", ["acme/other", "other/sql", "acme/sql@2.0.0", "acme/sql@<1"])
def test_another_package_than_was_asked_for_is_refused(
    text: str, package: Path, trust: TrustStore
) -> None:
    with pytest.raises(TrustError, match=r"the package is acme/sql@1\.0\.0"):
        verify_contents(read_package(package), trust, expected=Reference.parse(text))


def test_a_key_that_nobody_trusts_is_refused(package: Path, nobody: TrustStore) -> None:
    with pytest.raises(TrustError) as caught:
        verify_contents(read_package(package), nobody)
    assert "trust" in caught.value.hint


def test_a_key_of_another_namespace_is_refused(
    package: Path, nobody: TrustStore, key: PrivateKey
) -> None:
    nobody.add(key.public, name="x", namespaces=["local"])
    with pytest.raises(TrustError, match="acme"):
        verify_contents(read_package(package), nobody)


def test_a_revoked_key_is_refused(package: Path, trust: TrustStore, key: PrivateKey) -> None:
    trust.revoke(key.public.key_id, "stolen")
    with pytest.raises(RevokedError, match="revoked"):
        verify_contents(read_package(package), trust)


def test_a_key_for_certain_contents_signs_no_other(
    package: Path, nobody: TrustStore, key: PrivateKey
) -> None:
    contents = read_package(package)
    digest = str(contents.content_digest)
    nobody.add(key.public, name="x", namespaces=["acme"], content_digests=[digest])
    assert verify_contents(contents, nobody).signer == key.public.key_id
    other = PrivateKey.generate()
    nobody.add(other.public, name="y", namespaces=["acme"], content_digests=[f"sha256:{'0' * 64}"])
    with pytest.raises(TrustError):
        verify_contents(re_signed(package, other), nobody)


def re_signed(package: Path, key: PrivateKey) -> PackageContents:
    copy = Path(shutil.copy(package, package.parent / f"{key.public.key_id[7:15]}.expert"))
    sign_package(copy, key)
    return read_package(copy)


def test_an_unsigned_package_needs_the_users_word(unsigned: Path, trust: TrustStore) -> None:
    contents = read_package(unsigned)
    with pytest.raises(UnsignedError) as caught:
        verify_contents(contents, trust)
    assert "expertctl sign" in caught.value.hint
    assert accept_unsigned(contents).signer is None


def test_a_signed_package_is_never_accepted_as_unsigned(package: Path) -> None:
    with pytest.raises(TrustError, match="its signature must be verified"):
        accept_unsigned(read_package(package))


def test_a_stripped_signature_is_a_package_without_one(
    package: Path, trust: TrustStore, tmp_path: Path
) -> None:
    files = read_packed_files(read_archive(package))
    del files["model.sig"]
    with pytest.raises(UnsignedError):
        verify_contents(
            read_package(write_frame(make_package_archive(files), tmp_path / "x.expert")), trust
        )


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("expert.json", {"version": "2.0.0"}),
        ("expert.json", {"name": "acme/other"}),
        ("expert.json", {"description": "other"}),
        ("adapter_config.json", {"lora_alpha": 1}),
    ],
)
def test_an_old_signature_on_other_files_is_refused(
    path: str, changes: dict[str, object], package: Path, trust: TrustStore, tmp_path: Path
) -> None:
    files = edit_json_file(
        read_packed_files(read_archive(package)), path, lambda document: document.update(changes)
    )
    with pytest.raises(SignatureError, match=path):
        verify_contents(
            read_package(write_frame(make_package_archive(files), tmp_path / "x.expert")), trust
        )


def test_a_file_that_the_signature_does_not_cover_is_refused(
    package: Path, trust: TrustStore, tmp_path: Path
) -> None:
    files = {**read_packed_files(read_archive(package)), "README.md": b"trust me"}
    with pytest.raises(SignatureError, match=r"README\.md"):
        verify_contents(
            read_package(write_frame(make_package_archive(files), tmp_path / "x.expert")), trust
        )


def test_a_file_that_the_signature_covers_and_is_gone_is_refused(
    base_dir: Path, shared: Path, key: PrivateKey, trust: TrustStore, tmp_path: Path
) -> None:
    from expertctl.package.base_model import read_base
    from expertctl.package.build import build_package, plan_build
    from expertctl.package.draft import ManifestOverrides
    from tests.factories import write_lora

    lora = write_lora(tmp_path / "with-card", base_dir)
    (lora / "README.md").write_text("card")
    plan = plan_build(lora, ManifestOverrides(name="acme/card"), base=read_base(base_dir))
    path = build_package(plan, tmp_path / "card.expert", key=key).path
    assert verify_contents(read_package(path), trust).signer
    files = read_packed_files(read_archive(path))
    del files["README.md"]
    with pytest.raises(SignatureError, match=r"README\.md"):
        verify_contents(
            read_package(write_frame(make_package_archive(files), tmp_path / "x.expert")), trust
        )


@pytest.mark.parametrize("signature", [b"", b"{}", b"not json", b"\x30\x06\x02\x01\x00"])
def test_a_signature_that_is_none_is_refused(
    signature: bytes, package: Path, trust: TrustStore, tmp_path: Path
) -> None:
    files = {**read_packed_files(read_archive(package)), "model.sig": signature}
    with pytest.raises(SignatureError):
        verify_contents(
            read_package(write_frame(make_package_archive(files), tmp_path / "x.expert")), trust
        )


def test_a_damaged_file_never_reaches_the_question_of_trust(
    package: Path, trust: TrustStore, tmp_path: Path
) -> None:
    tar = bytearray(read_archive(package))
    tar[-2000] ^= 1
    with pytest.raises((DigestError, InvalidPackageError)):
        verify_contents(read_package(write_frame(bytes(tar), tmp_path / "x.expert")), trust)
