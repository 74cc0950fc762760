"""``expertctl login`` and ``logout``: what is kept, what is never shown, and who one is."""

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, CredentialStore
from expertctl.registry.errors import RetrySchedule
from expertctl.settings import Home
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.hostile_registry import (
    ReceivedRequest,
    Reply,
    ReplyScript,
    Serve,
    make_reply,
    serve,
)
from tests.registry.live_registry import LiveRegistry, run_live_registry

__all__ = ["expertctl", "serve"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "registry") as live:
        yield live


def kept(home: Path, url: str) -> Credential | None:
    return CredentialStore(Home(home).credentials).find_credential(RegistryAddress.parse(url), {})


def from_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(text))


def foreign(secret: str = "bWU6c2VjcmV0") -> ReplyScript:
    """A registry that is not ours, with Basic."""

    def script(request: ReceivedRequest) -> Reply:
        if not request.path.startswith("/v2"):
            return make_reply(404)
        good = request.login == f"Basic {secret}"
        return make_reply(200 if good else 401, WWW_Authenticate='Basic realm="x"')

    return script


@pytest.mark.parametrize("name", ["login", "logout"])
def test_every_command_has_an_example(name: str, expertctl: CommandRunner) -> None:
    text = expertctl(name, "--help").out
    assert f"expertctl {name}" in text.split("Example")[1]
    assert "--json" in text


def test_a_login_at_our_registry_says_who_one_is(
    registry: LiveRegistry, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = registry.served.create_user("alice", admin=True)
    from_stdin(monkeypatch, f"{secret}\n")
    said = expertctl("login", registry.host, "--token-stdin", "--json")
    assert said.document["user"] == "alice"
    assert said.document["admin"] is True
    assert said.document["checked"] is True
    assert kept(home, registry.url) == Credential("alice", secret)
    assert secret not in said.out + said.err
    assert Home(home).credentials.stat().st_mode & 0o777 == 0o600
    text = expertctl("logout", registry.host)
    assert text.out == f"logged out of {registry.host}\n"
    assert kept(home, registry.url) is None
    again = expertctl("logout", registry.host, "--json").document
    assert again == {"registry": registry.host, "url": registry.url, "removed": False}


def test_a_login_in_words(
    registry: LiveRegistry, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_stdin(monkeypatch, registry.served.create_user("bob"))
    said = expertctl("login", registry.host, "--token-stdin")
    first, second = said.out.splitlines()
    assert first == f"logged in to {registry.host} as bob"
    assert second.startswith("token test: read push delete yank manage; does not expire")


def test_a_token_that_is_wrong_is_not_kept(
    registry: LiveRegistry, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_stdin(monkeypatch, "xpt_" + "0" * 43)
    said = expertctl("login", registry.host, "--token-stdin", exit_code=6)
    assert registry.host in said.err
    assert not Home(home).credentials.exists()


def test_the_environment_gives_the_token_of_its_registry(
    registry: LiveRegistry, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = registry.served.create_user("ci")
    monkeypatch.setenv("EXPERT_TOKEN", secret)
    monkeypatch.setenv("EXPERT_REGISTRY", registry.host)
    assert expertctl("login", "--json").document["user"] == "ci"
    monkeypatch.setenv("EXPERT_REGISTRY", "other.example")
    from_stdin(monkeypatch, "")
    said = expertctl("login", registry.host, exit_code=2)
    assert "no terminal" in said.err


def test_a_foreign_registry_is_asked_by_its_own_interface(
    serve: Serve, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(foreign())
    from_stdin(monkeypatch, "secret")
    said = expertctl("login", server.url, "--user", "me", "--token-stdin", "--json")
    assert said.document == {
        "registry": server.address.host, "url": server.url, "user": "me", "admin": False,
        "checked": True, "scopes": None, "expires": None,
    }  # fmt: skip
    assert kept(home, server.url) == Credential("me", "secret")
    from_stdin(monkeypatch, "wrong")
    expertctl("login", server.url, "--user", "me", "--token-stdin", exit_code=6)
    assert kept(home, server.url) == Credential("me", "secret")


def test_a_known_registry_is_where_its_accepted_address_says(
    registry: LiveRegistry, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = KnownRegistry(registry.host, f"https://{registry.host}", PrivateKey.generate().public)
    TrustStore(Home(home).trust).add_registry(tls)
    from_stdin(monkeypatch, registry.served.create_user("alice"))
    monkeypatch.setattr(RetrySchedule, "pause", _give_up)
    said = expertctl("login", registry.host, "--token-stdin", exit_code=6)
    assert "no connection" in said.err  # TLS, where the server speaks none


def _give_up(
    retries: RetrySchedule, attempt: int, error: Exception, *, stop: object = None
) -> None:
    del retries, attempt, stop
    raise error


def test_a_registry_that_lets_anybody_in_is_said_to(
    serve: Serve, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda r: make_reply(200, b"{}") if r.path == "/v2/" else make_reply(404))
    from_stdin(monkeypatch, "secret")
    said = expertctl("login", server.url, "--token-stdin")
    assert "accepts anyone" in said.err
    assert said.out == f"logged in to {server.address.host} as token\n"


def test_another_realm_is_kept_only_when_it_is_named(
    serve: Serve, home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(request: ReceivedRequest) -> Reply:
        return make_reply(200, b'{"token": "t"}') if request.login else make_reply(401)

    def script(request: ReceivedRequest) -> Reply:
        if not request.path.startswith("/v2"):
            return make_reply(404)
        challenge = f'Bearer realm="{realm.alias_url}/token"'
        return make_reply(200) if request.login else make_reply(401, WWW_Authenticate=challenge)

    realm = serve(token)
    server = serve(script)
    from_stdin(monkeypatch, "secret")
    said = expertctl("login", server.url, "--token-stdin", exit_code=6)
    assert f"--realm {realm.alias_url}" in said.err
    assert [request.login for request in realm.requests] == [None]
    from_stdin(monkeypatch, "secret")
    expertctl("login", server.url, "--token-stdin", "--realm", realm.alias_url)
    assert kept(home, server.url) == Credential("token", "secret", realm.alias_url)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["login"], "config set registry"),
        (["login", "http://r.example"], "allow_http"),
        (["login", "r.example/path"], "registry.example.com"),
        (["login", "r.example"], "--token-stdin"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_with_a_hint(
    words: list[str], hint: str, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_stdin(monkeypatch, "")
    assert hint in expertctl(*words, exit_code=2).err


def test_an_empty_token_is_refused(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_stdin(monkeypatch, " \n")
    assert "one word" in expertctl("login", "r.example", "--token-stdin", exit_code=2).err


def test_offline_no_login_is_tried(
    serve: Serve, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(foreign())
    monkeypatch.setenv("EXPERT_OFFLINE", "1")
    from_stdin(monkeypatch, "secret")
    said = expertctl("login", server.url, "--token-stdin", "--json", exit_code=6)
    assert said.document["error"]["code"] == "offline"
    assert server.requests == []


class LoginTerminal(StringIO):
    """A stdin at which somebody sits."""

    def isatty(self) -> bool:
        return True


def test_a_registry_that_cannot_be_reached_is_told_before_the_token_is_asked_for(
    home: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", LoginTerminal("xpt_never_asked\n"))
    monkeypatch.setattr(RetrySchedule, "pause", _give_up)
    said = expertctl("login", "127.0.0.1:1", exit_code=6)
    assert "no connection" in said.err
    assert "Token for" not in said.out + said.err
    assert sys.stdin.read() == "xpt_never_asked\n"
    assert not Home(home).credentials.exists()


def test_what_is_no_registry_is_told_before_the_token_is_asked_for(
    serve: Serve, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda _: make_reply(404))
    monkeypatch.setattr(sys, "stdin", LoginTerminal("xpt_never_asked\n"))
    expertctl("login", server.url, exit_code=3)
    assert sys.stdin.read() == "xpt_never_asked\n"
    assert [request.login for request in server.requests] == [None] * len(server.requests)


def test_the_prompt_does_not_echo(registry: LiveRegistry, home: Path) -> None:
    secret = registry.served.create_user("alice")
    leader, follower = pty.openpty()
    program = "from expertctl.cli.app import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "login", registry.host],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        cwd=ROOT,
        env={**os.environ, "EXPERT_HOME": str(home)},
        start_new_session=True,
        text=True,
    )
    os.close(follower)
    screen = b""
    while b"Token for" not in screen:
        screen += os.read(leader, 1024)
    for _ in range(1_000_000):  # what is typed before the terminal is quiet is thrown away
        if not termios.tcgetattr(leader)[3] & termios.ECHO:
            break
        os.sched_yield()
    os.write(leader, f"{secret}\n".encode())
    out, _ = process.communicate(timeout=60)
    screen += _rest(leader)
    assert process.returncode == 0, screen
    assert "as alice" in out
    assert secret.encode() not in screen
    assert kept(home, registry.url) == Credential("alice", secret)


def _rest(handle: int) -> bytes:
    data = b""
    try:
        while more := os.read(handle, 1024):
            data += more
    except OSError:  # how Linux says that nobody holds the other end
        pass
    os.close(handle)
    return data
