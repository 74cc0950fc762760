"""``export`` and ``import`` as a person types them."""

from pathlib import Path

import pytest

from expertctl.package.read import read_package
from tests.cli.command_runner import CommandRunner, expertctl
from tests.package.forged_packages import read_archive
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["expertctl", "fast", "package_factory", "user_home"]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(autouse=True)
def experts(user_home: HomeFixture, package_factory: PackageFactory, work: Path) -> None:
    user_home.install(
        package_factory.package("acme/low", seed=1),
        package_factory.package("acme/top", composition={"requires": ["acme/low@^1"]}, seed=3),
    )


def names(work: Path) -> list[str]:
    return sorted(path.name for path in work.iterdir())


def test_one_expert_is_written_as_the_file_it_came_in(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory, work: Path
) -> None:
    original = package_factory.package("acme/low", seed=1)
    assert expertctl("export", "acme/low", "--json").document == {
        "path": "low-1.0.0.expert",
        "ref": "acme/low@1.0.0",
        "package_digest": str(read_package(original).package_digest),
        "format": "expert",
    }
    assert (work / "low-1.0.0.expert").read_bytes() == original.read_bytes()
    assert expertctl("export", "low-1.0.0.expert", "-o", "copy.expert").out == "wrote copy.expert\n"
    assert (work / "copy.expert").read_bytes() == original.read_bytes()


def test_a_directory_for_peft_is_named_after_the_expert_or_the_file(
    expertctl: CommandRunner, user_home: HomeFixture, work: Path
) -> None:
    document = expertctl("export", "acme/low", "--peft", "--json").document
    assert (document["path"], document["adapters"]) == ("low-1.0.0", ["low-1.0.0"])
    assert document["format"] == "peft"
    assert names(work / "low-1.0.0") == ["adapter_config.json", "adapter_model.safetensors"]
    said = expertctl("export", "acme/low", "--peft", exit_code=2)
    assert "low-1.0.0 is not empty" in said.err
    expertctl("export", "acme/low", "-o", "x.expert")
    said = expertctl("export", "x.expert", "--peft")
    assert (said.out, "not verified" in said.err) == ("wrote x\n", True)


def test_a_set_goes_from_one_home_to_another(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = expertctl("export", "acme/top", "-o", "mine.experts", "--json").document
    low, top = user_home.store.list_experts()
    assert document == {
        "path": "mine.experts",
        "packages": [
            {"ref": "acme/low@1.0.0", "package_digest": str(low.package_digest)},
            {"ref": "acme/top@1.0.0", "package_digest": str(top.package_digest)},
        ],
        "format": "set",
    }
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "other-home"))
    said = expertctl("import", "mine.experts", exit_code=5)
    assert "expertctl trust add" in said.err
    other = HomeFixture(tmp_path / "other-home").trust_keys("acme")
    installed = expertctl("import", "mine.experts", "--json").document["installed"]
    assert [(item["ref"], item["outcome"]) for item in installed] == [
        ("acme/low@1.0.0", "installed"),
        ("acme/top@1.0.0", "installed"),
    ]
    assert [e.package_digest for e in other.store.list_experts()] == [
        low.package_digest,
        top.package_digest,
    ]
    assert other.catalogue.list_refs() == ["acme/low@1.0.0", "acme/top@1.0.0"]
    assert expertctl("import", "mine.experts").out.startswith("already installed: acme/low@1.0.0")
    other.check_integrity()


def test_a_version_that_another_content_has_here_is_imported_only_when_it_is_accepted(
    expertctl: CommandRunner,
    package_factory: PackageFactory,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expertctl("export", "acme/low", "acme/top", "-o", "mine.experts")
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "other-home"))
    other = HomeFixture(tmp_path / "other-home").trust_keys("acme")
    other.install(package_factory.package("acme/low", seed=2))
    said = expertctl("import", "mine.experts", exit_code=5)
    assert "`--accept-changed acme/low@1.0.0` accepts the new content" in said.err
    said = expertctl("import", "mine.experts", "--accept-changed", "acme/low@1.0.0")
    assert "replaced: acme/low@1.0.0" in said.out
    other.check_integrity()


def test_several_experts_become_a_set_and_with_oci_its_tar(
    expertctl: CommandRunner, user_home: HomeFixture, work: Path
) -> None:
    said = expertctl("export", "acme/top", "acme/low", "-o", "mine.experts")
    assert said.out == "wrote mine.experts\n  acme/low@1.0.0\n  acme/top@1.0.0\n"
    assert expertctl("export", "acme/top", "acme/low", "--oci", "-o", "mine.tar")
    assert (work / "mine.tar").read_bytes() == read_archive(work / "mine.experts")
    assert expertctl("import", "mine.tar").out.startswith("already installed")


def test_unsigned_experts_travel_with_leave(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory, work: Path
) -> None:
    user_home.install(package_factory.package("acme/unsigned", key=None), allow_unsigned=True)
    expertctl("export", "acme/unsigned", "-o", "x.experts")
    user_home.store.remove(next(e for e in user_home.store.list_experts() if e.signer is None))
    said = expertctl("import", "x.experts", exit_code=5)
    assert "--allow-unsigned" in said.err
    said = expertctl("import", "x.experts", "--allow-unsigned")
    assert "warning: acme/unsigned@1.0.0 is not signed" in said.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["export", "acme/low", "--oci", "--peft"], 2, "choose one of them"),
        (["export", "acme/low", "acme/top"], 2, "-o FILE.experts"),
        (["export", "acme/low", "acme/top", "-o", "x.expert"], 2, "name it x.experts"),
        (["export", "acme/low", "acme/top", "--peft", "-o", "x"], 2, "one by one"),
        (["export", "acme/none"], 3, "acme/none is not installed"),
        (["export", "acme/none", "acme/low", "-o", "x.experts"], 3, "acme/none is not installed"),
        (["export", "file.expert"], 2, "is a file already"),
        (["export", "none.expert"], 3, "none.expert: no such file"),
        (["export", "folder"], 8, "folder: not a regular file"),
        (["export", "file.expert", "acme/low", "-o", "x.experts"], 2, "is a file"),
        (["export", "acme/low", "-o", "none/x.expert"], 3, "none: no such directory"),
        (["export", "acme/low", "--peft", "-o", "none/x"], 3, "none: no such directory"),
        (["export", "file.expert", "--oci", "-o", "none/x"], 3, "none: no such directory"),
        (["export", "acme/low", "-o", "folder"], 2, "is a directory"),
        (["export"], 2, "is missing"),
        (["import", "none.experts"], 3, "no such file"),
        (["import", "file.expert"], 8, "expertctl install FILE"),
        (["import", "folder"], 8, "not a regular file"),
        (["import"], 2, "is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(
    words: list[str],
    code: int,
    told: str,
    expertctl: CommandRunner,
    user_home: HomeFixture,
    package_factory: PackageFactory,
    work: Path,
) -> None:
    (work / "file.expert").write_bytes(package_factory.package("acme/low", seed=1).read_bytes())
    (work / "folder").mkdir()
    before = user_home.read_files()
    assert told in expertctl(*words, exit_code=code).err
    assert names(work) == ["file.expert", "folder"]
    assert user_home.read_files() == before


@pytest.mark.parametrize("change", ["cut", "flipped", "appended"])
def test_a_set_that_was_tampered_with_leaves_the_store_alone(
    change: str, expertctl: CommandRunner, user_home: HomeFixture, work: Path
) -> None:
    expertctl("export", "acme/top", "-o", "mine.experts")
    data = bytearray((work / "mine.experts").read_bytes())
    if change == "cut":
        del data[len(data) // 2 :]
    elif change == "flipped":
        data[len(data) // 2] ^= 0x55
    else:
        data += b"more"
    (work / "mine.experts").write_bytes(data)
    for expert in user_home.store.list_experts():
        user_home.store.remove(expert)
    said = expertctl("import", "mine.experts", "--json", exit_code=5 if change == "flipped" else 8)
    assert set(said.document) == {"error"}
    assert user_home.refs() == []
    user_home.check_integrity()
