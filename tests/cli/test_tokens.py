"""``token`` through the entry point, against a live registry."""

import pytest

from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.live_registry import (
    LiveRegistry,
    alice,
    live,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["alice", "expertctl", "live", "tiny_base", "trust", "workspace"]


def test_a_new_token_is_shown_once_and_works(
    expertctl: CommandRunner, live: LiveRegistry, alice: str
) -> None:
    words = ["token", "new", "ci", "--scope", "push:acme", "--scope", "read", "--expires", "90d"]
    said = expertctl(*words, "--json").document
    assert (said["name"], said["scopes"]) == ("ci", ["push:acme", "read"])
    assert said["expires"] is not None
    assert live.served.authenticate(said["token"]).name == "alice"
    listed = expertctl("token", "list")
    assert said["id"] in listed.out
    assert "push:acme read" in listed.out
    assert said["token"] not in listed.out + listed.err


def test_only_the_secret_goes_to_stdout(expertctl: CommandRunner, alice: str) -> None:
    said = expertctl("token", "new", "ci", "--scope", "read")
    assert said.out.startswith("xpt_")
    assert said.out.count("\n") == 1
    assert "not shown again" in said.err
    assert said.out.strip() not in said.err


def test_a_revoked_token_ends_at_once(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, home: object
) -> None:
    made = expertctl("token", "new", "ci", "--json").document
    assert expertctl("token", "revoke", made["id"]).out == f"revoked {made['id']}\n"
    assert made["id"] not in expertctl("token", "list").out
    client = live.served.client(made["token"])
    assert client.get("/api/v1/whoami").status_code == 401


def test_attack_80_a_token_mints_none_that_may_do_more(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, home: object
) -> None:
    made = expertctl("token", "new", "ci", "--scope", "push:acme", "--json").document
    store_credential(live, home, made["token"])  # type: ignore[arg-type]
    for scope in ("admin", "push", "manage", "push:other"):
        said = expertctl("token", "new", "more", "--scope", scope, "--json", exit_code=6)
        assert said.document["error"]["code"] == "forbidden"
    expertctl("token", "list", exit_code=6)


@pytest.mark.parametrize("text", ["90", "0d", "-1d", "1y", "d", "1000000d", "9 d"])
def test_a_lifetime_that_is_none_is_a_slip(text: str, expertctl: CommandRunner, alice: str) -> None:
    assert "90d, 12h or 2w" in expertctl("token", "new", "ci", f"--expires={text}", exit_code=2).err


def test_a_scope_that_is_none_is_refused(expertctl: CommandRunner, alice: str) -> None:
    said = expertctl("token", "new", "ci", "--scope", "everything", exit_code=2)
    assert said.err.startswith("error: 'everything' is not a scope")
    assert "push:acme" in said.err


def test_a_token_that_is_not_there_is_not_found(expertctl: CommandRunner, alice: str) -> None:
    said = expertctl("token", "revoke", "0123456789abcdef", exit_code=3)
    assert "there is no token '0123456789abcdef'" in said.err


def test_attack_80_a_secret_in_place_of_its_id_is_neither_sent_nor_repeated(
    expertctl: CommandRunner, live: LiveRegistry, alice: str
) -> None:
    """A path is in logs of servers and proxies."""
    said = expertctl("token", "revoke", alice, exit_code=2)
    assert alice[:8] not in said.err
    assert "token list" in said.err


@pytest.mark.parametrize("text", ["../users/alice", "", "%2e%2e", "a b"])
def test_what_is_no_id_is_a_slip(text: str, expertctl: CommandRunner, alice: str) -> None:
    assert "not a token id" in expertctl("token", "revoke", text, exit_code=2).err


def test_many_tokens_are_listed_page_by_page(
    expertctl: CommandRunner, live: LiveRegistry, alice: str
) -> None:
    for _ in range(120):
        live.served.create_token("alice")
    assert len(expertctl("token", "list", "--json").document["tokens"]) == 121
