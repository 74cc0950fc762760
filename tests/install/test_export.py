"""Experts taken elsewhere: as files, archives for other tools, directories for PEFT, sets."""

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from expertctl.errors import (
    DigestError,
    InvalidPackageError,
    MissingDependencyError,
    NotFoundError,
    UsageError,
)
from expertctl.install.installed_experts import ExportFormat, export_package, export_set
from expertctl.package.layout import REF_NAME
from expertctl.package.read import read_package, read_set
from expertctl.reference import Digest, hash_file
from tests.package.forged_packages import read_archive, write_frame
from tests.store.fixtures import HomeFixture, PackageFactory


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    """A house with a chain of three experts, of one of which there are two versions."""
    user_home.install(
        package_factory.package("acme/low", "1.0.0"),
        package_factory.package("acme/low", "1.1.0", seed=1),
        package_factory.package("acme/middle", composition={"requires": ["acme/low@^1"]}, seed=2),
        package_factory.package("acme/top", composition={"requires": ["acme/middle"]}, seed=3),
        package_factory.package("acme/alone", seed=4),
    )
    return user_home


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refs(path: Path) -> list[str]:
    return [contents.manifest.ref for contents in read_set(path)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_an_installed_expert_is_written_as_the_file_it_came_in(
    user_home: HomeFixture, package_factory: PackageFactory, out: Path
) -> None:
    done = export_package("acme/alone", out / "x.expert", form="expert", store=user_home.store)
    original = package_factory.package("acme/alone", seed=4)
    assert (out / "x.expert").read_bytes() == original.read_bytes()
    assert (done.ref, done.adapters) == ("acme/alone@1.0.0", ())
    assert done.package_digest == read_package(original).package_digest


@pytest.mark.parametrize("target", ["file", "ref"])
def test_the_oci_archive_is_the_very_tar_of_the_file(
    target: str, user_home: HomeFixture, package_factory: PackageFactory, out: Path
) -> None:
    original = package_factory.package("acme/alone", seed=4)
    source = str(original) if target == "file" else "acme/alone"
    export_package(source, out / "x.tar", form="oci", store=user_home.store)
    assert (out / "x.tar").read_bytes() == read_archive(original)
    assert names(out) == ["x.tar"]


def test_an_oci_archive_is_a_layout_for_any_reader(user_home: HomeFixture, out: Path) -> None:
    done = export_package("acme/alone", out / "x.tar", form="oci", store=user_home.store)
    with tarfile.open(out / "x.tar", "r:") as tar:
        blobs = {m.name: (tar.extractfile(m) or io.BytesIO()).read() for m in tar}
    assert json.loads(blobs["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(blobs["index.json"])["manifests"]
    assert entry["digest"] == str(done.package_digest)
    for name, data in blobs.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{Digest.compute(data).hex}"
    manifest = json.loads(blobs[f"blobs/sha256/{done.package_digest.hex}"])
    for descriptor in (manifest["config"], *manifest["layers"]):
        assert len(blobs[f"blobs/sha256/{descriptor['digest'][7:]}"]) == descriptor["size"]


def test_a_directory_for_peft_comes_from_a_file_or_the_store(
    user_home: HomeFixture, package_factory: PackageFactory, out: Path
) -> None:
    file = str(package_factory.package("acme/alone", seed=4))
    for name, target in (("a", file), ("b", "acme/alone")):
        done = export_package(target, out / name, form="peft", store=user_home.store)
        assert done.adapters == (".",)
    assert names(out / "a") == names(out / "b")
    for name in names(out / "a"):
        assert (out / "a" / name).read_bytes() == (out / "b" / name).read_bytes()


FORMS: list[ExportFormat] = ["expert", "oci", "peft"]


@pytest.mark.parametrize("form", FORMS)
def test_a_bit_that_flipped_in_the_store_leaves_nothing(
    form: ExportFormat, user_home: HomeFixture, out: Path
) -> None:
    expert = user_home.refs().index("acme/alone@1.0.0")
    weights = max(user_home.store.list_experts()[expert].files, key=lambda file: file.size)
    blob = user_home.store.blob_path(weights.digest)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)
    with pytest.raises(DigestError):
        export_package("acme/alone", out / "x", form=form, store=user_home.store)
    with pytest.raises(DigestError):
        export_set(["acme/alone"], out / "x", form="set", store=user_home.store)
    assert names(out) == []


def test_a_damaged_file_leaves_nothing(
    user_home: HomeFixture, package_factory: PackageFactory, out: Path
) -> None:
    tar = bytearray(read_archive(package_factory.package()))
    tar[-1500] ^= 1
    damaged = write_frame(bytes(tar), out / "bad.expert")
    with pytest.raises((DigestError, InvalidPackageError)):
        export_package(str(damaged), out / "x.tar", form="oci", store=user_home.store)
    assert names(out) == ["bad.expert"]


def test_a_set_holds_what_was_named_and_all_it_requires(user_home: HomeFixture, out: Path) -> None:
    done = export_set(["acme/top"], out / "x.experts", form="set", store=user_home.store)
    expected = ["acme/low@1.1.0", "acme/middle@1.0.0", "acme/top@1.0.0"]
    assert [item.ref for item in done] == refs(out / "x.experts") == expected
    digests = {e.ref: e.package_digest for e in user_home.store.list_experts()}
    assert [item.package_digest for item in done] == [digests[ref] for ref in expected]


def test_a_version_that_was_named_serves_as_what_another_requires(
    user_home: HomeFixture, out: Path
) -> None:
    targets = ["acme/low@1.0.0", "acme/middle"]
    export_set(targets, out / "x.experts", form="set", store=user_home.store)
    assert refs(out / "x.experts") == ["acme/low@1.0.0", "acme/middle@1.0.0"]


def test_a_set_is_the_same_bytes_however_it_was_named(user_home: HomeFixture, out: Path) -> None:
    first, second = ["acme/alone", "acme/top"], ["acme/top", "acme/low@1.1.0", "acme/alone"]
    for form, suffix in (("set", "experts"), ("oci", "tar")):
        for name, targets in (("a", first), ("b", second)):
            path = out / f"{name}.{suffix}"
            export_set(targets, path, form=form, store=user_home.store)  # type: ignore[arg-type]  # of a tuple
        assert (out / f"a.{suffix}").read_bytes() == (out / f"b.{suffix}").read_bytes()
    assert read_archive(out / "a.experts") == (out / "a.tar").read_bytes()


def test_shared_blobs_are_in_a_set_once(user_home: HomeFixture, out: Path) -> None:
    export_set(["acme/top", "acme/alone"], out / "x.tar", form="oci", store=user_home.store)
    with tarfile.open(out / "x.tar", "r:") as tar:
        members = tar.getnames()
    assert len(members) == len(set(members))
    packages = [e for e in user_home.store.list_experts() if e.ref != "acme/low@1.0.0"]
    blobs = {file.digest for expert in packages for file in expert.layers}
    assert len(blobs) < sum(len(expert.layers) for expert in packages)
    assert len(members) == 2 + len(packages) + 1 + len(blobs)


def test_what_a_set_cannot_be_made_of_is_named(
    user_home: HomeFixture, package_factory: PackageFactory, out: Path
) -> None:
    with pytest.raises(NotFoundError, match="acme/none"):
        export_set(["acme/none"], out / "x.experts", form="set", store=user_home.store)
    file = str(package_factory.package("acme/alone", seed=4))
    with pytest.raises(UsageError, match="is a file") as caught:
        export_set([file, "acme/top"], out / "x.experts", form="set", store=user_home.store)
    assert f"expertctl install {file}" in caught.value.hint
    for expert in user_home.store.list_experts():
        if expert.package.name == "low":
            user_home.store.remove(expert)
    with pytest.raises(MissingDependencyError, match=r"acme/middle@1\.0\.0 requires acme/low@\^1"):
        export_set(["acme/top"], out / "x.experts", form="set", store=user_home.store)
    with pytest.raises(UsageError, match="is a directory"):
        export_set(["acme/alone"], out, form="set", store=user_home.store)
    assert names(out) == []


@pytest.mark.all
def test_skopeo_reads_one_package(user_home: HomeFixture, out: Path) -> None:
    done = export_package("acme/alone", out / "x.tar", form="oci", store=user_home.store)
    manifest = copied_by_skopeo(out / "x.tar", out)
    assert Digest.compute(manifest) == done.package_digest


@pytest.mark.all
def test_skopeo_copies_each_package_out_of_a_set(user_home: HomeFixture, out: Path) -> None:
    done = export_set(["acme/top"], out / "x.tar", form="oci", store=user_home.store)
    assert REF_NAME == "org.opencontainers.image.ref.name"
    for item in done:
        manifest = copied_by_skopeo(out / "x.tar", out, item.ref.replace("@", ":"))
        assert Digest.compute(manifest) == item.package_digest


def copied_by_skopeo(archive: Path, out: Path, name: str | None = None) -> bytes:
    """Copy an image to a folder and check its blobs there; return its manifest."""
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("needs Debian's skopeo: apt-get install skopeo")
    policy, target = out / "policy.json", out / (name or "one").replace("/", "-").replace(":", "-")
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    source = f"oci-archive:{archive}" + (f":{name}" if name else "")
    subprocess.run(
        [skopeo, "--policy", str(policy), "copy", source, f"dir:{target}"],
        check=True,
        capture_output=True,
    )
    manifest = (target / "manifest.json").read_bytes()
    for layer in json.loads(manifest)["layers"]:
        size, digest = hash_file(target / layer["digest"].removeprefix("sha256:"))
        assert (size, str(digest)) == (layer["size"], layer["digest"])
    return manifest
