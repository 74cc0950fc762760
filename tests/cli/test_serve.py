"""``expertctl serve key`` and what ``serve`` refuses before anything is loaded."""

from pathlib import Path

import pytest

from expertctl.server.api_keys import ApiKeyStore
from tests.cli.command_runner import CommandRunner

pytestmark = pytest.mark.all


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


def test_a_new_key_is_shown_once_and_listed_without_its_secret(
    run: CommandRunner, home: Path
) -> None:
    made = run("serve", "key", "new", "alice", "--per-minute", 60, "--expires", "30d")
    secret = made.out.strip()
    assert secret.startswith("xpk_")
    assert "not shown again" in made.err
    listed = run("serve", "key", "list")
    assert "alice" in listed.out
    assert secret not in listed.out
    (key,) = run("serve", "key", "list", "--json").document["keys"]
    assert (key["name"], key["requests_per_minute"], key["tokens_per_minute"]) == (
        "alice",
        60,
        None,
    )
    assert key["created"] < key["expires"]
    assert secret not in (home / "api-keys.json").read_text()


def test_a_key_that_was_made_opens_what_the_server_reads(run: CommandRunner, home: Path) -> None:
    made = run("serve", "key", "new", "bot", "--max-tokens-per-minute", 9, "--json").document
    found = ApiKeyStore(home / "api-keys.json").find(made["secret"], now=0.0)
    assert found is not None
    assert (found.id, found.tokens_per_minute) == (made["id"], 9)
    assert not found.manages


def test_a_key_that_manages_is_made_as_such_and_told_apart(run: CommandRunner, home: Path) -> None:
    run("serve", "key", "new", "bot")
    secret = run("serve", "key", "new", "ops", "--manage").out.strip()
    found = ApiKeyStore(home / "api-keys.json").find(secret, now=0.0)
    assert found is not None
    assert found.manages
    listed = run("serve", "key", "list").out.splitlines()
    assert [line.split()[-1] == "yes" for line in listed[-2:]] == [False, True]
    keys = run("serve", "key", "list", "--json").document["keys"]
    assert [(key["name"], key["manages"]) for key in keys] == [("bot", False), ("ops", True)]


def test_the_last_key_that_is_revoked_leaves_the_server_closed(
    run: CommandRunner, home: Path
) -> None:
    run("serve", "key", "new", "alice")
    said = run("serve", "key", "revoke", "alice")
    assert "all requests are refused" in said.err
    assert run("serve", "key", "list").out == ""
    assert (home / "api-keys.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("serve", "key", "new", "Alice"), 2, "not a valid key name"),
        (("serve", "key", "new", "a", "--per-minute", "0"), 2, "a limit must be"),
        (("serve", "key", "new", "a", "--expires", "soon"), 2, "not a span of time"),
        (("serve", "key", "new", "a", "--expires", "0"), 2, "expired already"),
        (("serve", "key", "revoke", "nobody"), 3, "no key 'nobody'"),
        (("serve", "--host", "0.0.0.0"), 2, "no API keys"),
        (("serve", "--rows", "0"), 2, "rows"),
        (("serve", "--queue", "-1"), 2, "queue"),
        (("serve", "--timeout", "0"), 2, "timeout"),
        (("serve", "--behind", "0"), 2, "behind"),
        (("serve", "--port", "65536"), 2, "port"),
        (("serve", "--tls-cert", "chain.pem"), 2, "go together"),
        (("serve", "--url", "ftp://x"), 2, "url"),
        (("serve", "--validator", "x"), 2, "not a validator"),
        (("serve", "--memory-budget", "lots"), 2, "not a size"),
        (("serve", "--alias", "gpt-4o-mini"), 2, "not ALIAS=MODEL"),
        (("serve", "--alias", "auto=starter"), 2, "would hide the model auto"),
        (("serve", "--alias", "acme/sql=auto"), 2, "would hide that expert"),
        (("serve", "--alias", "q=acme/typo"), 3, "the alias q: acme/typo is not installed"),
        (("serve", "--alias", "q=p", "--alias", "p=auto"), 2, "which is an alias itself"),
        (("serve", "--alias", "q=acme/typo:1e9"), 2, "the alias q: weight"),
        (("serve", "--allow-host", "http://host"), 2, "not a host name"),
        (("serve", "--allow-origin", "*"), 2, "not the origin of a page"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    run: CommandRunner, words: tuple[str, ...], code: int, says: str
) -> None:
    assert says in run(*words, exit_code=code).err


def test_others_are_not_answered_in_clear_text(run: CommandRunner) -> None:
    run("serve", "key", "new", "alice")
    said = run("serve", "--host", "0.0.0.0", exit_code=2)
    assert "clear text" in said.err
    assert "--tls-cert" in said.err


def test_an_option_counts_before_the_environment_and_that_before_the_file(
    run: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("config", "set", "serve_url", "ftp://file")
    assert "ftp://file" in run("serve", exit_code=2).err
    monkeypatch.setenv("EXPERT_SERVE_URL", "ftp://environment")
    assert "ftp://environment" in run("serve", exit_code=2).err
    assert "ftp://option" in run("serve", "--url", "ftp://option", exit_code=2).err


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("serve_host", "0.0.0.0", "no API keys"),
        ("serve_tls_cert", "chain.pem", "go together"),
        ("serve_aliases", "gpt=auto,acme/sql=auto", "would hide that expert"),
        ("serve_allowed_hosts", "host.docker.internal,host:80", "host:80"),
        ("serve_allowed_origins", "localhost:3000", "not the origin of a page"),
    ],
)
def test_what_is_kept_is_refused_as_an_option_is(
    run: CommandRunner, key: str, value: str, says: str
) -> None:
    run("config", "set", key, value)
    assert says in run("serve", exit_code=2).err
