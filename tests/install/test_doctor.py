"""What is wrong is found, named, and told with the way out."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.install.doctor import Diagnosis, Finding, count_blob_bytes, examine_store
from expertctl.reference import Digest, FileDigest, Reference
from expertctl.store.refs import StoredExpert, encode_ref
from tests.store.fixtures import BASE_NAME, HomeFixture, PackageFactory, make_key


def diagnose(user_home: HomeFixture) -> Diagnosis:
    return examine_store(
        user_home.store, bases=user_home.bases, trust=user_home.trust, catalogue=user_home.catalogue
    )


def only(user_home: HomeFixture) -> Finding:
    before = user_home.read_files()
    diagnosis = diagnose(user_home)
    assert user_home.read_files() == before
    assert len(diagnosis.findings) == 1, diagnosis.findings
    (finding,) = diagnosis.findings
    assert diagnosis.healthy is not finding.broken
    assert finding.hint
    return finding


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    user_home.bases.add(package_factory.base_dir)
    user_home.install(
        package_factory.package("acme/one"),
        package_factory.package("acme/two", seed=4),
        catalogue=user_home.catalogue,
    )
    return user_home


@pytest.fixture
def one(user_home: HomeFixture) -> StoredExpert:
    return user_home.store.find(Reference.parse("acme/one"))


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    mode = path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(change(path.read_bytes()))
    path.chmod(mode)


def ref_path(user_home: HomeFixture, name: str) -> Path:
    return user_home.home.store / "refs" / "local" / "acme" / name / "1.0.0"


def test_a_healthy_store_has_no_findings(user_home: HomeFixture) -> None:
    seen: list[int] = []
    diagnosis = examine_store(
        user_home.store,
        bases=user_home.bases,
        trust=user_home.trust,
        catalogue=user_home.catalogue,
        progress=seen.append,
    )
    assert diagnosis.findings == ()
    assert diagnosis.healthy
    blobs = list(user_home.store.paths.blobs.iterdir())
    size = sum(path.stat().st_size for path in blobs)
    assert (diagnosis.experts, diagnosis.blobs, diagnosis.size) == (2, len(blobs), size)
    assert sum(seen) == count_blob_bytes(user_home.store) == size


def test_an_empty_home_has_no_findings(tmp_path: Path) -> None:
    user_home = HomeFixture(tmp_path / "nowhere")
    assert diagnose(user_home) == Diagnosis((), 0, 0, 0)
    assert not user_home.root.exists()


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_flipped_bit_is_found_and_named(data: st.DataObject, user_home: HomeFixture) -> None:
    one = user_home.store.find(Reference.parse("acme/one"))
    two = user_home.store.find(Reference.parse("acme/two"))
    own = [file for file in one.layers if file not in two.layers]
    file = data.draw(st.sampled_from(own))
    bit = data.draw(st.integers(0, file.size * 8 - 1))
    path = user_home.store.blob_path(file.digest)

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << (bit % 8)
        return bytes(changed)

    edit(path, flip)
    try:
        finding = only(user_home)
    finally:
        edit(path, flip)
    assert finding.subject == "acme/one@1.0.0"
    assert finding.problem.startswith(f"{file.path} was changed: {path}")
    assert "expertctl install" in finding.hint


def test_a_shared_file_is_named_for_every_expert(user_home: HomeFixture, one: StoredExpert) -> None:
    path = user_home.store.blob_path(one.find_file("adapter_config.json").digest)
    edit(path, lambda content: content.replace(b"LORA", b"LOHA"))
    subjects = [finding.subject for finding in diagnose(user_home).findings]
    assert subjects == ["acme/one@1.0.0", "acme/two@1.0.0"]


def test_a_file_that_is_cut_short_is_told_apart(user_home: HomeFixture, one: StoredExpert) -> None:
    file = one.find_file("adapter_model.safetensors")
    edit(user_home.store.blob_path(file.digest), lambda content: content[:-100])
    finding = only(user_home)
    assert f"has {file.size - 100:,} of {file.size:,} bytes" in finding.problem


def test_a_missing_file_is_told_apart(user_home: HomeFixture, one: StoredExpert) -> None:
    user_home.store.blob_path(one.find_file("adapter_model.safetensors").digest).unlink()
    assert "adapter_model.safetensors is missing" in only(user_home).problem


def test_installing_again_cures_it(
    user_home: HomeFixture, package_factory: PackageFactory, one: StoredExpert
) -> None:
    user_home.store.blob_path(one.files[0].digest).unlink()
    assert not diagnose(user_home).healthy
    user_home.install(package_factory.package("acme/one"))
    assert diagnose(user_home).findings == ()


def test_a_damaged_record_is_found(user_home: HomeFixture) -> None:
    edit(ref_path(user_home, "one"), lambda content: content[:100])
    findings = diagnose(user_home).findings
    assert findings[0].subject == "acme/one@1.0.0"
    assert "expertctl remove acme/one@1.0.0" in findings[0].hint
    assert findings[0].broken


@pytest.mark.parametrize("key", ["content_digest", "package_digest", "requires", "base"])
def test_a_record_that_says_something_else_than_its_files_is_found(
    key: str, user_home: HomeFixture
) -> None:
    def lie(content: bytes) -> bytes:
        document = json.loads(content)
        document["content_digest"] = "sha256:" + "0" * 64
        other = {
            "content_digest": document["content_digest"],
            "package_digest": "sha256:" + "1" * 64,
            "requires": ["acme/two"],
            "base": {**document["base"], "arch": "sha256:" + "2" * 64},
        }
        document = {**json.loads(content), key: other[key]}
        return json.dumps(document, indent=1).encode() + b"\n"

    edit(ref_path(user_home, "one"), lie)
    problems = [finding.problem for finding in diagnose(user_home).findings]
    assert any(key.replace("_", " ") in problem for problem in problems), problems


def test_a_revoked_signer_is_found(user_home: HomeFixture) -> None:
    user_home.trust.revoke(make_key("acme").public.key_id, "stolen")
    findings = diagnose(user_home).findings
    assert [finding.subject for finding in findings] == ["acme/one@1.0.0", "acme/two@1.0.0"]
    assert all("stolen" in finding.problem and finding.broken for finding in findings)


def test_a_signer_that_is_trusted_no_more_is_noted(user_home: HomeFixture) -> None:
    user_home.trust.remove(make_key("acme").public.key_id)
    diagnosis = diagnose(user_home)
    assert len(diagnosis.findings) == 2
    assert diagnosis.healthy


def test_an_unsigned_expert_is_noted(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(
        package_factory.package("acme/odd", key=None),
        allow_unsigned=True,
        catalogue=user_home.catalogue,
    )
    finding = only(user_home)
    assert (finding.subject, finding.broken) == ("acme/odd@1.0.0", False)


def test_a_requirement_that_was_removed_by_force_is_found(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(
        package_factory.package("acme/top", composition={"requires": ["acme/two"]}),
        catalogue=user_home.catalogue,
    )
    two = user_home.store.find(Reference.parse("acme/two"))
    user_home.store.remove(two)
    user_home.catalogue.remove(two)
    finding = only(user_home)
    assert finding.subject == "acme/top@1.0.0"
    assert "requires acme/two, which is not installed" in finding.problem


def test_files_that_belong_to_nothing_are_noted(user_home: HomeFixture) -> None:
    (user_home.store.paths.blobs / ("0" * 64)).write_bytes(b"stray")
    finding = only(user_home)
    assert "1 files of 5 bytes" in finding.problem
    assert "gc" in finding.hint


def test_a_strange_file_is_noted(user_home: HomeFixture) -> None:
    (user_home.store.paths.blobs / "README").write_bytes(b"")
    assert only(user_home).subject.endswith("README")


def test_what_a_killed_install_left_is_noted(user_home: HomeFixture) -> None:
    folder = user_home.store.paths.staging / "left"
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert only(user_home).subject == str(folder)
    user_home.store.collect_garbage()
    assert diagnose(user_home).findings == ()


def test_files_that_others_may_change_are_found(user_home: HomeFixture, one: StoredExpert) -> None:
    path = user_home.store.blob_path(one.files[0].digest)
    path.chmod(0o666)
    finding = only(user_home)
    assert (finding.subject, finding.hint) == (str(path), f"chmod go-w {path}")
    path.chmod(0o444)
    ref_path(user_home, "one").chmod(0o664)
    assert only(user_home).subject == str(ref_path(user_home, "one"))


def test_a_damaged_catalogue_is_found(user_home: HomeFixture) -> None:
    user_home.home.index.write_bytes(b"no database at all" * 300)
    user_home.home.index.chmod(0o600)
    finding = only(user_home)
    assert finding.subject == str(user_home.home.index)
    assert "reindex" in finding.hint
    assert finding.broken


@pytest.mark.parametrize("folder", [".", "deep"])
def test_damaged_routing_vectors_are_noted(
    user_home: HomeFixture, package_factory: PackageFactory, folder: str
) -> None:
    user_home.install(
        package_factory.package("acme/one"), catalogue=user_home.catalogue, index=user_home.index
    )
    (rows,) = (user_home.root / folder).glob("vectors-*.rows")
    rows.write_bytes(rows.read_bytes()[:-1] + b"\x7f")
    (finding,) = diagnose(user_home).findings
    assert finding.subject.endswith("vectors.journal")
    assert finding.problem == f"{rows.name} was changed"
    assert diagnose(user_home).healthy


def test_a_catalogue_that_lags_behind_is_noted(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package("acme/three"))
    finding = only(user_home)
    assert (finding.subject, finding.broken) == (str(user_home.home.index), False)


def test_a_trust_record_that_cannot_be_read_is_found_once(user_home: HomeFixture) -> None:
    user_home.home.trust.write_bytes(b"{")
    finding = only(user_home)
    assert (finding.subject, finding.broken) == (str(user_home.home.trust), True)
    assert str(user_home.home.trust) not in finding.problem
    user_home.home.trust.write_bytes(b"{}")
    user_home.home.trust.chmod(0o666)
    assert "chmod 600" in only(user_home).hint


def test_a_folder_in_place_of_the_trust_record_is_found(user_home: HomeFixture) -> None:
    user_home.home.trust.unlink()
    user_home.home.trust.mkdir()
    assert only(user_home).problem == "Is a directory"


def test_a_changed_base_is_found(user_home: HomeFixture) -> None:
    moved = user_home.root / "moved"
    record = user_home.home.bases / BASE_NAME / "base.json"
    document = json.loads(record.read_text())
    document["path"] = str(moved)
    record.write_text(json.dumps(document))
    finding = only(user_home)
    assert finding.subject == BASE_NAME
    assert "config.json is missing" in finding.problem
    record.write_bytes(b"")
    assert "is damaged" in only(user_home).problem


def test_a_base_that_was_never_added_is_noted(user_home: HomeFixture) -> None:
    user_home.bases.remove(user_home.bases.find(BASE_NAME))
    diagnosis = diagnose(user_home)
    assert diagnosis.healthy
    assert ["base add" in finding.hint for finding in diagnosis.findings] == [True, True]


def test_a_file_that_cannot_be_read_is_told_apart(
    user_home: HomeFixture, one: StoredExpert
) -> None:
    path = user_home.store.blob_path(one.find_file("adapter_model.safetensors").digest)
    path.unlink()
    path.mkdir(mode=0o700)
    finding = only(user_home)
    assert finding.subject == one.ref
    assert "adapter_model.safetensors cannot be read" in finding.problem
    assert finding.broken


def test_a_record_whose_manifest_means_nothing_is_found(
    user_home: HomeFixture, one: StoredExpert
) -> None:
    data = b"{}"
    digest = Digest.compute(data)
    user_home.store.paths.blob(digest).write_bytes(data)
    files = tuple(
        FileDigest(f.path, len(data), digest) if f.path == "expert.json" else f for f in one.files
    )
    ref_path(user_home, "one").write_bytes(encode_ref(replace(one, files=files)))
    problems = [f.problem for f in diagnose(user_home).findings if f.subject == one.ref]
    assert any("expert.json" in problem for problem in problems)
