"""``publish`` and ``yank`` through the entry point, against a live registry."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.package.read import read_package
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from registry_server.access.rights import Action, TokenScope
from tests.cli.command_runner import CommandRunner, expertctl
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
    live,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["admin", "alice", "expertctl", "live", "tiny_base", "trust", "workspace"]

pytestmark = pytest.mark.all


@pytest.fixture
def key(expertctl: CommandRunner, alice: str, workspace: PackageWorkspace) -> str:
    """The id of alice's key, which counts in acme."""
    said = expertctl("registry", "keys", "add", "me", "--namespace", "acme", "--json")
    return str(said.document["key_id"])


def test_publish_says_what_is_there_now(
    expertctl: CommandRunner, live: LiveRegistry, key: str, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    contents = read_package(path)
    said = expertctl("publish", path, "--json")
    (package,) = said.document["packages"]
    sent = package.pop("sent")
    assert said.document["registry"] == live.host
    assert (said.document["user"], said.document["dry_run"]) == ("alice", False)
    assert package == {
        "ref": "acme/sql@1.0.0",
        "path": str(path),
        "outcome": "published",
        "content_digest": str(contents.content_digest),
        "package_digest": str(contents.package_digest),
        "signer": key,
        "bytes": sum(blob["size"] for blob in sent),
        "quota": 50_000_000_000,
        "used": 0,
        "install": f"expertctl install {live.host}/acme/sql@1.0.0",
    }
    assert len(sent) == len(contents.layout.blobs) + 1


def test_publish_for_people(
    expertctl: CommandRunner, live: LiveRegistry, key: str, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package())
    lines = said.out.splitlines()
    assert lines[0].startswith(f"published: acme/sql@1.0.0 on {live.host}, 5 of 5 blobs sent")
    assert [line.split()[0] for line in lines[1:]] == ["content", "package", "signer", "install"]
    assert said.err == f"publishing to {live.host} as alice\n"


def test_publishing_again_says_so(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    expertctl("publish", path)
    said = expertctl("publish", path)
    assert said.out.startswith("already published: acme/sql@1.0.0")
    assert "0 of 5 blobs sent, 0 B" in said.out


def test_a_dry_run_shows_what_would_travel_and_sends_nothing(
    expertctl: CommandRunner, live: LiveRegistry, key: str, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package())
    second = workspace.package(version="1.1.0")
    said = expertctl("publish", second, "--dry-run")
    assert said.out.startswith(f"would be published: acme/sql@1.1.0 on {live.host}, 2 of 5 blobs")
    assert "acme: " in said.out
    assert "50.0 GB used, 50.0 GB left" in said.out
    states = {line.split()[0]: "to upload" in line for line in said.out.splitlines()[3:]}
    assert states == {
        "(configuration)": False,
        "adapter_config.json": False,
        "adapter_model.safetensors": False,
        "expert.json": True,
        "model.sig": True,
    }
    again = expertctl("publish", second, "--dry-run", "--json").document
    assert again["packages"][0]["outcome"] == "would be published"
    expertctl("info", "acme/sql@1.1.0", exit_code=3)


def test_a_dry_run_says_when_it_may_not_fit(
    expertctl: CommandRunner,
    live: LiveRegistry,
    key: str,
    workspace: PackageWorkspace,
    admin: str,
    home: Path,
) -> None:
    live.served.create_namespace("small", kind="expert", owner="alice", quota=1000)
    TrustStore(home / "trust.json").add(workspace.key.public, name="me", namespaces=["small"])
    expertctl("registry", "keys", "add", "me", "--namespace", "small")
    path = workspace.package("small/sql")
    assert "may not fit" in expertctl("publish", path, "--dry-run").out
    said = expertctl("publish", path, "--json", exit_code=7)
    assert said.document["error"]["code"] == "budget"


def test_another_content_says_that_a_version_never_changes(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package())
    other = workspace.package(output=workspace.folder / "other.expert", lora={"seed": 3})
    assert "a version never changes" in expertctl("publish", other, exit_code=4).err


def test_an_unsigned_file_is_refused_without_a_registry(
    expertctl: CommandRunner, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package(key=None), exit_code=5)
    assert "expertctl sign" in said.err


def test_without_a_registry_the_hint_says_how_to_set_one(
    expertctl: CommandRunner, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package(), exit_code=2)
    assert "no registry is set" in said.err
    assert "config set registry" in said.err


def test_without_a_login_the_hint_is_the_login(
    expertctl: CommandRunner, live: LiveRegistry, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package(), "--registry", live.host, exit_code=6)
    assert "expertctl login" in said.err


def test_a_registry_that_is_not_there_is_named(
    expertctl: CommandRunner, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package(), "--registry", "127.0.0.1:1", exit_code=6)
    assert "127.0.0.1:1" in said.err


def test_a_fresh_administrator_is_led_from_error_to_error_to_a_published_package(
    expertctl: CommandRunner, live: LiveRegistry, admin: str, home: Path,
    workspace: PackageWorkspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store_credential(live, home, admin)
    monkeypatch.setenv("EXPERT_REGISTRY", live.host)
    path = workspace.package()
    assert "`expertctl registry namespace add acme`" in expertctl("publish", path, exit_code=3).err
    expertctl("registry", "namespace", "add", "acme")
    said = expertctl("publish", path, exit_code=5)
    assert "`expertctl registry keys add KEY --namespace acme`" in said.err
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    assert expertctl("publish", path).out.startswith("published: acme/sql@1.0.0")


def test_a_dry_run_tells_all_that_is_missing_at_once(
    expertctl: CommandRunner, live: LiveRegistry, admin: str, home: Path,
    workspace: PackageWorkspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store_credential(live, home, admin)
    monkeypatch.setenv("EXPERT_REGISTRY", live.host)
    TrustStore(home / "trust.json").remove(workspace.key.public.key_id)
    TrustStore(home / "trust.json").add(workspace.key.public, name="me", namespaces=["local"])
    signed, unsigned = workspace.package(), workspace.package("zoo/cats", key=None)
    error = expertctl("publish", signed, unsigned, "--dry-run", "--json", exit_code=5).document[
        "error"
    ]
    assert error["message"].startswith("this would not be published: 5 problems\n")
    for line in (
        "(me) may not sign 'acme/*' (if it is your key: `expertctl keys grant me --namespace acme`",
        "zoo/cats@1.0.0 is not signed",
        f"{live.host} has no namespace 'acme' that you may use",
        "`expertctl registry keys add KEY --namespace acme`",
        f"{live.host} has no namespace 'zoo' that you may use",
    ):
        assert line in error["message"]
    expertctl("registry", "namespace", "add", "acme")
    expertctl("keys", "grant", "me", "--namespace", "acme")
    left = expertctl("publish", signed, "--dry-run", exit_code=5).err
    assert left.startswith(f"error: {live.host} does not know the key ")


def test_a_dry_run_without_a_registry_tells_what_the_file_lacks_too(
    expertctl: CommandRunner, workspace: PackageWorkspace
) -> None:
    said = expertctl("publish", workspace.package(key=None), "--dry-run", exit_code=5).err
    assert "2 problems" in said
    assert "acme/sql@1.0.0 is not signed" in said
    assert "no registry is set" in said


def test_several_files_go_in_the_order_of_what_they_require(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace
) -> None:
    top = workspace.package("acme/top", composition={"requires": ["acme/bottom"]})
    bottom = workspace.package("acme/bottom")
    said = expertctl("publish", top, bottom, "--json")
    assert [p["ref"] for p in said.document["packages"]] == ["acme/bottom@1.0.0", "acme/top@1.0.0"]


def test_of_several_files_one_that_is_bad_stops_all_before_anything_travels(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace
) -> None:
    good, bad = workspace.package("acme/good"), workspace.package("acme/bad", key=None)
    assert "acme/bad@1.0.0 is not signed" in expertctl("publish", good, bad, exit_code=5).err
    assert "there is no package acme/good" in expertctl("info", "acme/good", exit_code=3).err


def test_attack_100_a_package_with_a_token_in_it_is_not_published(
    expertctl: CommandRunner, alice: str, key: str, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    files = read_packed_files(read_archive(path))
    write_frame(make_package_archive({**files, "README.md": f"use {alice}".encode()}), path)
    expertctl("sign", path, "--key", "me")
    said = expertctl("publish", path, exit_code=8)
    assert "README.md: holds an access token" in said.err
    assert alice not in said.err + said.out


@pytest.mark.parametrize(
    "words",
    [["login", "--token", "x"], ["login", "--password", "x"], ["publish", "--token", "x", "f"]],
)
def test_attack_100_a_token_on_the_command_line_is_no_option(
    words: list[str], expertctl: CommandRunner
) -> None:
    """Every user of the machine could read it in the process list."""
    assert "there is no option" in expertctl(*words, exit_code=2).err


def test_attack_80_a_token_never_shows_in_what_is_said(
    expertctl: CommandRunner,
    live: LiveRegistry,
    alice: str,
    key: str,
    home: Path,
    workspace: PackageWorkspace,
) -> None:
    limited = live.served.create_token("alice", TokenScope(Action.READ))
    store_credential(live, home, limited)
    said = expertctl("publish", workspace.package(), "--json", exit_code=6)
    assert said.document["error"]["code"] == "forbidden"
    store_credential(live, home, "xpt_" + "0" * 43)
    also = expertctl("publish", workspace.package(), exit_code=6)
    for text in (said.out, said.err, also.out, also.err):
        assert "xpt_" not in text


def test_attack_80_a_token_of_a_removed_user_publishes_nothing(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, key: str, admin: str, home: Path,
    workspace: PackageWorkspace,
) -> None:  # fmt: skip
    live.served.create_user("second")
    store_credential(live, home, admin)
    expertctl("registry", "namespace", "member", "acme", "second", "--role", "owner")
    expertctl("registry", "user", "remove", "alice")
    store_credential(live, home, alice)
    assert "expertctl login" in expertctl("publish", workspace.package(), exit_code=6).err


def test_yank_and_back(
    expertctl: CommandRunner, live: LiveRegistry, key: str, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package())
    said = expertctl("yank", "acme/sql@1.0.0", "--reason", "drops rows", "--json")
    expected = {"ref": "acme/sql@1.0.0", "registry": live.host, "yanked": "drops rows"}
    assert said.document == expected
    assert "(yanked: drops rows)" in expertctl("info", "acme/sql@1.0.0").out
    assert "is available again" in expertctl("yank", "acme/sql@1.0.0", "--undo").out
    assert "yanked" not in expertctl("info", "acme/sql").out


def test_attack_79_somebody_who_does_not_own_it_yanks_nothing(
    expertctl: CommandRunner, live: LiveRegistry, key: str, home: Path, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package())
    store_credential(live, home, live.served.create_user("mallory"))
    said = expertctl("yank", "acme/sql@1.0.0", "--reason", "mine", "--json", exit_code=6)
    assert said.document["error"]["code"] == "forbidden"
    assert "yanked" not in expertctl("info", "acme/sql").out


def test_attack_79_a_reason_with_control_characters_is_refused_or_shown_without_them(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package())
    said = expertctl("yank", "acme/sql@1.0.0", "--reason", "a\x1b[31mb\nsigner  you", exit_code=2)
    assert "\x1b" not in said.err
    expertctl("yank", "acme/sql@1.0.0", "--reason", "<script>alert(1)</script>")
    assert "(yanked: <script>alert(1)</script>)" in expertctl("info", "acme/sql@1.0.0").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["acme/sql@1.0.0"], "--reason"),
        (["acme/sql@1.0.0", "--reason", "x", "--undo"], "--undo"),
        (["acme/sql", "--reason", "x"], "does not name one version"),
        (["acme/sql@^1", "--reason", "x"], "does not name one version"),
        (
            ["a.example/acme/sql@1.0.0", "--reason", "x", "--registry", "b.example"],
            "two registries",
        ),
    ],
)
def test_a_yank_that_says_too_little_or_too_much_is_a_slip(
    words: list[str], said: str, expertctl: CommandRunner
) -> None:
    assert said in expertctl("yank", *words, exit_code=2).err


def test_the_registry_that_a_namespace_was_given_to_is_the_one_that_is_meant(
    expertctl: CommandRunner, live: LiveRegistry, key: str, workspace: PackageWorkspace,
    trust: TrustStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    index_key = live.served.registry.index_key.public
    trust.add_registry(KnownRegistry(live.host, live.url, index_key, namespaces=("acme",)))
    monkeypatch.setenv("EXPERT_REGISTRY", "127.0.0.1:1")
    assert expertctl("publish", workspace.package(), "--json").document["registry"] == live.host


def test_a_key_of_somebody_else_is_not_taken_for_ones_own(
    expertctl: CommandRunner, key: str, workspace: PackageWorkspace, trust: TrustStore
) -> None:
    stranger = PrivateKey.generate()
    path = workspace.package(key=stranger)
    assert "trust" in expertctl("publish", path, exit_code=5).err
    trust.add(stranger.public, name="stranger", namespaces=["acme"])
    assert stranger.public.key_id in expertctl("publish", path, exit_code=5).err


def test_a_namespace_that_is_known_from_two_registries_needs_one_to_be_named(
    expertctl: CommandRunner,
    live: LiveRegistry,
    key: str,
    workspace: PackageWorkspace,
    trust: TrustStore,
) -> None:
    """Nothing is published to whichever comes first, where an older release pinned both alike."""
    index_key = PrivateKey.generate().public
    for host in ("a.example", "b.example"):
        trust.add_registry(KnownRegistry(host, f"https://{host}", index_key))
    trust.update(
        lambda record: replace(
            record, registries=tuple(replace(r, pinned=("acme",)) for r in record.registries)
        )
    )
    path = workspace.package()
    said = expertctl("publish", path, exit_code=2)
    assert "a.example, b.example" in said.err
    assert "--registry" in said.err
    assert expertctl("publish", path, "--registry", live.host, "--json").document["packages"]
