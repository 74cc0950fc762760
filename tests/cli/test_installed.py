"""``install``, ``list``, ``remove``, ``gc``, ``doctor`` and ``reindex`` as a person types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.reference import Digest, Reference
from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import (
    BASE_NAME,
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["expertctl", "fast", "package_factory", "user_home"]


@pytest.mark.parametrize("command", ["install", "list", "remove", "gc", "doctor", "reindex"])
def test_every_command_has_an_example(command: str, expertctl: CommandRunner) -> None:
    text = expertctl(command, "--help").out
    assert f"expertctl {command}" in text.split("Example")[1]
    assert "--json" in text


def test_an_empty_home_lists_nothing_and_says_how_to_begin(
    expertctl: CommandRunner, home: Path
) -> None:
    said = expertctl("list")
    assert said.out == ""
    assert "expertctl install FILE" in said.err
    assert expertctl("list", "--json").document == {"experts": [], "damaged": []}
    assert not home.exists()


def test_what_is_installed_is_listed(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    said = expertctl(
        "install",
        package_factory.package(),
        package_factory.package("acme/odd", key=None),
        exit_code=5,
    )
    assert "error: acme/odd@1.0.0 is not signed\n\nhint: " in said.err
    assert expertctl("list", "--json").document["experts"] == []

    files = [package_factory.package(), package_factory.package("acme/odd", key=None)]
    said = expertctl("install", *files, "--allow-unsigned")
    assert [line.split()[1] for line in said.out.splitlines()] == [
        "acme/sql@1.0.0",
        "acme/odd@1.0.0",
    ]
    assert "warning: acme/odd@1.0.0 is not signed" in said.err

    header, odd, sql = expertctl("list").out.splitlines()
    assert header.split() == ["NAME", "VERSION", "REGISTRY", "BASE", "SIZE", "SIGNER", "FLAGS"]
    assert odd.split()[:4] == ["acme/odd", "1.0.0", "(file)", BASE_NAME]
    assert odd.split()[-2:] == ["-", "unsigned"]
    assert sql.split()[-1] == "acme"
    user_home.trust.revoke(make_key("acme").public.key_id)
    assert expertctl("list").out.splitlines()[-1].split()[-1] == "revoked"


def test_the_list_as_json_has_all_that_is_known(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("install", package_factory.package())
    (expert,) = user_home.store.list_experts()
    assert expertctl("list", "--json").document["experts"] == [
        {
            "ref": "acme/sql@1.0.0",
            "name": "acme/sql",
            "version": "1.0.0",
            "registry": "local",
            "base": BASE_NAME,
            "size": expert.size,
            "signer": make_key("acme").public.key_id,
            "signer_name": "acme",
            "flags": [],
            "suspicions": [],
            "content_digest": str(expert.content_digest),
            "package_digest": str(expert.package_digest),
            "warnings": [],
            "used": True,
            "yanked": None,
        }
    ]


def test_installing_prints_one_document(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (shown,) = expertctl("install", package_factory.package(), "--json").document["installed"]
    assert (shown["ref"], shown["outcome"]) == ("acme/sql@1.0.0", "installed")
    assert any("not added yet" in warning for warning in shown["warnings"])
    (again,) = expertctl("install", package_factory.package(), "--json").document["installed"]
    assert again["outcome"] == "already installed"
    assert user_home.catalogue.list_refs() == ["acme/sql@1.0.0"]


def test_an_error_is_a_document_too(expertctl: CommandRunner, tmp_path: Path) -> None:
    said = expertctl("install", tmp_path / "absent.expert", "--json", exit_code=3)
    assert said.document["error"]["code"] == "not_found"
    assert "absent.expert" in said.document["error"]["message"]


@pytest.mark.parametrize(
    ("word", "code", "text"),
    [
        ("acme/sql@^1", 3, "no registry is set"),
        ("absent.expert", 3, "no such file"),
        ("not a file", 3, "no such file"),
        (".", 8, "not a regular file"),
    ],
)
def test_what_cannot_be_installed_is_told_with_its_code(
    word: str, code: int, text: str, expertctl: CommandRunner
) -> None:
    assert text in expertctl("install", word, exit_code=code).err


def test_nothing_to_install_is_a_usage_error(expertctl: CommandRunner) -> None:
    assert "nothing to install" in expertctl("install", exit_code=2).err


def test_removing_names_dependants(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    top = package_factory.package("acme/top", composition={"requires": ["acme/sql"]})
    expertctl("install", package_factory.package(), top)
    said = expertctl("remove", "acme/sql", exit_code=4)
    assert "needed by acme/top@1.0.0" in said.err
    assert "--force" in said.err
    said = expertctl("remove", "acme/sql", "--force", "--json")
    assert said.document["removed"] == "acme/sql@1.0.0"
    assert said.document["freed"] > 0
    assert "warning: acme/top@1.0.0" in said.err
    assert expertctl("remove", "acme/top@1.0.0").out.startswith("removed acme/top@1.0.0")
    assert "acme/top is not installed" in expertctl("remove", "acme/top", exit_code=3).err
    assert user_home.catalogue.list_refs() == []


def test_garbage_is_shown_and_removed(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("install", package_factory.package())
    (user_home.store.paths.blobs / Digest.compute(b"x").hex).write_bytes(b"x" * 1500)
    assert expertctl("gc", "--dry-run").out.startswith("would free 1.5 kB: 1 files")
    assert expertctl("gc", "--json").document == {
        "dry_run": False,
        "blobs": [str(Digest.compute(b"x"))],
        "folders": [],
        "copies": [],
        "size": 1500,
    }
    assert expertctl("gc").out.startswith("freed 0 B")


def test_the_doctor_exits_with_1_when_something_is_broken(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("install", package_factory.package())
    said = expertctl("doctor")
    assert "note: acme/sql@1.0.0: its base" in said.out
    assert said.out.splitlines()[-1].endswith("nothing is broken")
    expert = user_home.store.find(Reference.parse("acme/sql"))
    path = user_home.store.blob_path(expert.find_file("expert.json").digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))
    path.chmod(0o444)
    said = expertctl("doctor", exit_code=1)
    assert f"broken: acme/sql@1.0.0: expert.json was changed: {path}" in said.out
    assert "  hint: install it again from its file" in said.out
    document = expertctl("doctor", "--json", exit_code=1).document
    assert not document["healthy"]
    assert document["findings"][0]["broken"]


def test_reindexing_tells_what_it_left_out(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("install", package_factory.package(), package_factory.package("acme/two"))
    user_home.home.index.write_bytes(b"garbage" * 1000)
    said = expertctl("reindex")
    assert said.out == "indexed 2 experts\n"
    assert "was damaged" in said.err
    assert user_home.catalogue.list_refs() == ["acme/sql@1.0.0", "acme/two@1.0.0"]
    expert = user_home.store.find(Reference.parse("acme/two"))
    user_home.store.blob_path(expert.find_file("expert.json").digest).unlink()
    document = expertctl("reindex", "--json").document
    assert document["experts"] == 1
    assert "acme/two@1.0.0" in document["warnings"][0]


def test_a_damaged_record_is_a_warning_of_the_list(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("install", package_factory.package())
    path = user_home.home.store / "refs" / "local" / "acme" / "sql" / "1.0.0"
    path.write_bytes(b"")
    assert "warning: the record of acme/sql@1.0.0 is damaged" in expertctl("list").err
    assert expertctl("list", "--json").document["damaged"][0]["ref"] == "acme/sql@1.0.0"
    assert "gc" not in expertctl("gc", exit_code=1).out


def test_control_characters_of_a_package_never_reach_the_terminal(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package())
    path = user_home.home.store / "refs" / "local" / "acme" / "sql" / "1.0.0"
    document = json.loads(path.read_text())
    document["base"]["name"] = "evil\x1b[31m"
    path.write_text(json.dumps(document, indent=1) + "\n")
    assert "\x1b" not in expertctl("list").out


def test_the_list_starts_without_the_libraries_of_other_commands(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package(), catalogue=user_home.catalogue)
    program = (
        "import sys; from expertctl.cli.app import run; run(['list'])\n"
        "heavy = {'sqlite3', 'sqlite_utils', 'cryptography', 'numpy', 'jsonschema_rs', 'torch',\n"
        "         'zstandard', 'msgspec', 'filelock', 'asyncio', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "EXPERT_HOME": str(user_home.root)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "acme/sql" in result.stdout
    assert result.stderr == "[]\n"
