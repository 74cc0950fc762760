"""``registry user``, ``namespace`` and ``keys`` through the entry point, on a live registry."""

from pathlib import Path

import pytest

from expertctl.settings import Home
from expertctl.trust.keys import KeyRing
from registry_server.access.rights import Action, TokenScope
from tests.cli.command_runner import CommandRunner, expertctl
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


@pytest.fixture
def chief(live: LiveRegistry, admin: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An administrator, who is logged in."""
    store_credential(live, home, admin)
    monkeypatch.setenv("EXPERT_REGISTRY", live.host)
    return admin


def test_a_new_user_gets_a_token_that_is_shown_once(
    expertctl: CommandRunner, live: LiveRegistry, chief: str
) -> None:
    said = expertctl("registry", "user", "add", "bob")
    secret = said.out.strip()
    assert live.served.authenticate(secret).name == "bob"
    assert secret not in said.err
    assert f"expertctl login {live.host}" in said.err
    listed = expertctl("registry", "user", "list").out
    assert [line.split()[:2] for line in listed.splitlines()] == [
        ["NAME", "ROLE"],
        ["bob", "user"],
        ["chief", "admin"],
    ]
    document = expertctl("registry", "user", "add", "eve", "--admin", "--json").document
    assert (document["name"], document["admin"]) == ("eve", True)


def test_a_removed_user_is_let_in_no_more_and_the_name_stays_taken(
    expertctl: CommandRunner, live: LiveRegistry, chief: str
) -> None:
    secret = expertctl("registry", "user", "add", "bob").out.strip()
    assert "bob no longer has an account" in expertctl("registry", "user", "remove", "bob").out
    assert live.served.client(secret).get("/api/v1/whoami").status_code == 401
    expertctl("registry", "user", "add", "bob", exit_code=4)
    expertctl("registry", "user", "remove", "nobody-here", exit_code=3)


def test_a_namespace_is_made_with_its_owners_shown_and_changed(
    expertctl: CommandRunner, live: LiveRegistry, chief: str
) -> None:
    live.served.create_user("alice")
    said = expertctl(
        "registry", "namespace", "add", "acme", "--owner", "alice", "--quota", "20GB", "--json"
    ).document
    assert said == {
        "registry": live.host,
        "name": "acme",
        "kind": "expert",
        "read": "token",
        "quota": 20_000_000_000,
        "used": 0,
        "owners": ["alice"],
        "publishers": [],
        "keys": [],
    }
    words = ["registry", "namespace", "set", "acme", "--read", "public"]
    assert "read by everyone" in expertctl(*words).out
    again = expertctl("registry", "namespace", "set", "acme", "--quota", "default", "--json")
    assert (again.document["quota"], again.document["read"]) == (50_000_000_000, "public")
    listed = expertctl("registry", "namespace", "list").out.splitlines()
    assert listed[1].split() == ["acme", "expert", "public", "0", "B", "of", "50.0", "GB", "alice"]
    assert expertctl("registry", "namespace", "list", "--json").document["namespaces"]


def test_without_an_owner_whoever_makes_a_namespace_owns_it(
    expertctl: CommandRunner, chief: str
) -> None:
    said = expertctl("registry", "namespace", "add", "acme", "--kind", "oci")
    assert said.out.splitlines()[0] == "acme: oci, read by every account"
    assert "publish  chief" in said.out


def test_members_come_and_go(expertctl: CommandRunner, live: LiveRegistry, alice: str) -> None:
    live.served.create_user("bob")
    words = ["registry", "namespace", "member", "acme", "bob"]
    assert expertctl(*words, "--role", "publisher").out == "bob: publisher in acme/*\n"
    (shown,) = expertctl("registry", "namespace", "list", "--json").document["namespaces"]
    assert (shown["owners"], shown["publishers"]) == (["alice"], ["bob"])
    assert expertctl(*words, "--remove", "--json").document["role"] is None
    (shown,) = expertctl("registry", "namespace", "list", "--json").document["namespaces"]
    assert shown["publishers"] == []
    expertctl(*words, exit_code=2)
    expertctl(*words, "--role", "owner", "--remove", exit_code=2)


def test_a_user_administers_nothing(
    expertctl: CommandRunner, live: LiveRegistry, alice: str
) -> None:
    live.served.create_namespace("other", kind="expert")
    for words in (
        ["user", "add", "bob"],
        ["user", "list"],
        ["user", "remove", "alice"],
        ["namespace", "add", "mine"],
        ["namespace", "set", "other", "--read", "public"],
        ["namespace", "member", "other", "alice", "--role", "owner"],
    ):
        said = expertctl("registry", *words, "--json", exit_code=6)
        assert said.document["error"]["code"] == "forbidden"


def test_a_key_is_added_listed_and_revoked(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, workspace: PackageWorkspace
) -> None:
    key_id = workspace.key.public.key_id
    said = expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    assert said.out.splitlines() == [key_id, f"may sign acme/* on {live.host}"]
    listed = expertctl("registry", "keys", "list", "--namespace", "acme")
    assert listed.out.splitlines()[1].split() == [key_id, "ok"]
    words = ["registry", "keys", "revoke", "me", "--namespace", "acme", "--reason", "laptop stolen"]
    assert key_id in expertctl(*words).out
    (key,) = expertctl(*words[:2], "list", "--namespace", "acme", "--json").document["keys"]
    assert key == {"key_id": key_id, "revoked": True, "reason": "laptop stolen"}
    listed = expertctl("registry", "keys", "list", "--namespace", "acme")
    assert "revoked: laptop stolen" in listed.out


def test_an_older_key_of_ones_own_vouches_for_a_new_one(
    expertctl: CommandRunner, alice: str, workspace: PackageWorkspace
) -> None:
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    expertctl("keys", "new", "second", "--namespace", "acme")
    said = expertctl("registry", "keys", "add", "second", "--namespace", "acme", "--json")
    assert said.document["vouched_by"] == workspace.key.public.key_id
    assert said.document["warnings"] == []


def test_a_key_that_nobody_vouches_for_is_warned_of(
    expertctl: CommandRunner, alice: str, workspace: PackageWorkspace, home: Path
) -> None:
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    KeyRing(Home(home).keys).path("me").unlink()
    expertctl("keys", "new", "second", "--namespace", "acme")
    said = expertctl("registry", "keys", "add", "second", "--namespace", "acme")
    assert said.err.startswith("warning: ")


def test_a_public_key_may_come_as_a_file_and_a_private_one_may_not(
    expertctl: CommandRunner, alice: str, workspace: PackageWorkspace, tmp_path: Path
) -> None:
    public, private = tmp_path / "pub.pem", tmp_path / "key.pem"
    public.write_bytes(workspace.key.public.pem())
    private.write_bytes(workspace.key.pem())
    expertctl("registry", "keys", "add", private, "--namespace", "acme", exit_code=8)
    expertctl("registry", "keys", "add", public, "--namespace", "acme")
    said = expertctl("registry", "keys", "add", "nobody", "--namespace", "acme", exit_code=3)
    assert "keys list" in said.err


def test_a_token_to_push_manages_nothing(
    expertctl: CommandRunner,
    live: LiveRegistry,
    alice: str,
    home: Path,
    workspace: PackageWorkspace,
) -> None:
    store_credential(live, home, live.served.create_token("alice", TokenScope(Action.PUSH, "acme")))
    key = expertctl("registry", "keys", "add", "me", "--namespace", "acme", exit_code=6)
    live.served.create_user("bob")
    member = expertctl(
        "registry", "namespace", "member", "acme", "bob", "--role", "owner", exit_code=6
    )
    assert ["not for manage in acme" in said.err for said in (key, member)] == [True, True]


@pytest.mark.parametrize("name", ["..", "a/b", "A", "a%2fb", "", "x" * 65, "a\x1b[31mb"])
def test_what_is_no_name_never_gets_into_a_path(
    name: str, expertctl: CommandRunner, chief: str
) -> None:
    said = expertctl("registry", "user", "remove", name, exit_code=2)
    assert "\x1b" not in said.err
    expertctl("registry", "namespace", "set", name, "--read", "public", exit_code=2)
    assert "lower-case letters" in expertctl("registry", "user", "add", name, exit_code=2).err
    assert "lower-case letters" in expertctl("registry", "namespace", "add", name, exit_code=2).err


def test_nothing_to_change_is_a_slip(expertctl: CommandRunner, chief: str) -> None:
    assert "--quota" in expertctl("registry", "namespace", "set", "acme", exit_code=2).err
    expertctl("registry", "namespace", "set", "acme", "--quota", "much", exit_code=2)


@pytest.mark.parametrize(
    "words",
    [
        ["user", "add"], ["user", "list"], ["user", "remove"], ["namespace", "add"],
        ["namespace", "list"], ["namespace", "set"], ["namespace", "member"],
        ["keys", "add"], ["keys", "list"], ["keys", "revoke"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_has_an_example(words: list[str], expertctl: CommandRunner) -> None:
    said = expertctl("registry", *words, "--help")
    assert f"Example: expertctl registry {' '.join(words)}" in " ".join(said.out.split())
