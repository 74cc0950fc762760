"""``search`` and ``info`` through the entry point, against a live registry and a hostile one."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from expertctl.install.installer import InstallContext, install_files
from expertctl.package.read import read_package
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore
from registry_server.access.rights import Action, TokenScope
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    alice,
    live,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["alice", "expertctl", "live", "tiny_base", "trust", "workspace"]

pytestmark = pytest.mark.all

EVIL = "a\x1b[31mb\u202ec\nsigned by  sha256:you, trusted here"


@pytest.fixture
def published(expertctl: CommandRunner, alice: str, workspace: PackageWorkspace) -> Path:
    """Two versions of acme/sql; the file is the newer one."""
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    old = workspace.package(version="1.0.0", description="Writes SQL.")
    new = workspace.package(
        version="1.1.0",
        description="Writes better SQL.",
        routing={"task": "sql", "keywords": ["query"]},
        evaluation=[
            {
                "task": "sql",
                "dataset_sha256": "0" * 64,
                "n": 10,
                "metric": "exact_match",
                "base": 0.1,
                "expert": 0.9,
                "date": "2026-01-01",
            }
        ],
    )
    expertctl("publish", old, new)
    return new


def test_search_finds_by_name_description_and_keyword(
    expertctl: CommandRunner, live: LiveRegistry, published: Path
) -> None:
    for text in ("sql", "better", "query"):
        (hit,) = expertctl("search", text, "--json").document["results"]
        assert (hit["name"], hit["version"]) == ("acme/sql", "1.1.0")
    lines = expertctl("search", "sql").out.splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "KIND", "BASE", "DOWNLOADS", "DESCRIPTION"]
    assert lines[1].split() == [
        "acme/sql",
        "1.1.0",
        "lora",
        "base",
        "0",
        "Writes",
        "better",
        "SQL.",
    ]


def test_a_search_without_a_hit_says_where_it_looked(
    expertctl: CommandRunner, live: LiveRegistry, published: Path
) -> None:
    said = expertctl("search", "nothing-of-it")
    assert (said.out, said.err) == ("", f"nothing on {live.host} matches 'nothing-of-it'\n")
    assert expertctl("search", "nothing-of-it", "--json").document["results"] == []


def test_more_than_is_shown_is_said(
    expertctl: CommandRunner, published: Path, workspace: PackageWorkspace
) -> None:
    expertctl("publish", workspace.package("acme/sql-too"))
    said = expertctl("search", "sql", "--limit", 1)
    assert len(said.out.splitlines()) == 2
    assert "there are more than 1" in said.err
    assert expertctl("search", "sql", "--limit", 1, "--json").document["more"] is True


def test_info_says_all_that_a_person_wants_to_know(
    expertctl: CommandRunner, live: LiveRegistry, published: Path, workspace: PackageWorkspace
) -> None:
    contents = read_package(published)
    said = expertctl("info", "acme/sql")
    rows = dict(line.split(maxsplit=1) for line in said.out.split("\n\n")[0].splitlines())
    assert rows["registry"] == live.host
    assert rows["shown"] == "1.1.0"
    assert rows["description"] == "Writes better SQL."
    assert rows["evaluation"] == (
        "sql: 9 of 10 right (90 %, 95 % interval 60 to 98 %); base alone 1 of 10"
    )
    assert rows["owners"] == "alice"
    assert rows["signed"].split() == ["by", f"{workspace.key.public.key_id},", "trusted", "here"]
    assert rows["content"] == str(contents.content_digest)
    assert rows["package"] == str(contents.package_digest)
    assert rows["install"] == f"expertctl install {live.host}/acme/sql@1.1.0"
    assert rows["base"] in {"base", "here    no; `expertctl base add` adds it"}
    versions = said.out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in versions] == ["VERSION", "1.1.0", "1.0.0"]


def test_info_knows_the_base_the_key_and_what_is_installed_here(
    expertctl: CommandRunner,
    published: Path,
    workspace: PackageWorkspace,
    home: Path,
    trust: TrustStore,
) -> None:
    places = Home(home)
    bases = BaseStore(places.bases)
    bases.add(workspace.base_dir, name="mine")
    context = InstallContext(Store(places.store), bases, trust, places.registries)
    install_files([published], context)
    document = expertctl("info", "acme/sql", "--json").document
    assert document["offer"]["shown"]["base_here"] == "mine"
    assert document["offer"]["shown"]["trusted"] is True
    (installed,) = document["installed"]
    assert installed["version"] == "1.1.0"
    trust.remove(workspace.key.public.key_id)
    assert "not trusted here" in expertctl("info", "acme/sql").out


def test_info_of_a_version_shows_that_one(expertctl: CommandRunner, published: Path) -> None:
    document = expertctl("info", "acme/sql@1.0.0", "--json").document
    assert document["offer"]["shown"]["version"] == "1.0.0"
    assert document["offer"]["shown"]["manifest"]["description"] == "Writes SQL."
    assert "expertctl install" in document["offer"]["install"]
    said = expertctl("info", "acme/sql@^2", exit_code=3)
    assert "1.1.0, 1.0.0" in said.err


def test_info_of_what_only_this_machine_has(
    expertctl: CommandRunner, live: LiveRegistry, published: Path,
    workspace: PackageWorkspace, home: Path,
    trust: TrustStore,
) -> None:  # fmt: skip
    places, path = Home(home), workspace.package("acme/secret")
    store, bases = Store(places.store), BaseStore(places.bases)
    install_files([path], InstallContext(store, bases, trust, places.registries))
    said = expertctl("info", "acme/secret")
    assert "1.0.0 from a file" in said.out
    assert "showing only installed versions" in said.err
    assert expertctl("info", "acme/secret", "--json").document["offer"] is None


def test_info_of_what_is_installed_needs_no_registry(
    expertctl: CommandRunner, workspace: PackageWorkspace, home: Path, trust: TrustStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    places, path = Home(home), workspace.package("acme/secret")
    store, bases = Store(places.store), BaseStore(places.bases)
    install_files([path], InstallContext(store, bases, trust, places.registries))
    monkeypatch.delenv("EXPERT_REGISTRY", raising=False)
    said = expertctl("info", "acme/secret")
    assert "1.0.0 from a file" in said.out
    assert "description  LoRA adapter secret" in said.out
    assert "showing only installed versions: no registry is set" in said.err
    assert "no registry is set" in expertctl("info", "acme/none", exit_code=2).err


def test_info_of_what_is_nowhere_is_not_found(expertctl: CommandRunner, published: Path) -> None:
    assert "there is no package acme/none" in expertctl("info", "acme/none", exit_code=3).err
    assert "is not a package name" in expertctl("info", "Not A Name", exit_code=2).err


def test_a_token_for_something_else_shows_nothing(
    expertctl: CommandRunner, live: LiveRegistry, published: Path, home: Path
) -> None:
    store_credential(
        live, home, live.served.create_token("alice", TokenScope(Action.READ, "other"))
    )
    there, not_there = (
        expertctl("info", name, "--json", exit_code=6).document["error"]["message"]
        for name in ("acme/sql", "acme/bad")
    )
    assert there.replace("acme/sql", "acme/bad") == not_there


class Hostile(BaseHTTPRequestHandler):
    """Answers whatever the test put there."""

    answers: ClassVar[dict[str, Any]] = {}
    logins: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:  # the name that http.server calls
        path = self.path.partition("?")[0]
        self.logins.append(self.headers.get("Authorization"))
        body = json.dumps(self.answers.get(path, {})).encode()
        self.send_response(200 if path in self.answers else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Warning", f'299 - "{"x" * 20}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # its name there
        """Say nothing."""


Answering = Callable[[dict[str, Any]], str]


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """Serve answers, and be the registry that is set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def answering(answers: dict[str, Any]) -> str:
        monkeypatch.setattr(Hostile, "answers", answers)
        monkeypatch.setattr(Hostile, "logins", [])
        host = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("EXPERT_REGISTRY", host)
        return host

    yield answering
    server.shutdown()
    server.server_close()
    thread.join()


def version_of(**changes: object) -> dict[str, Any]:
    return {
        "version": "1.0.0",
        "content_digest": f"sha256:{'0' * 64}",
        "package_digest": f"sha256:{'1' * 64}",
        "signer": f"sha256:{'2' * 64}",
        **changes,
    }


def page_of(*versions: dict[str, Any], **changes: object) -> dict[str, Any]:
    latest = versions[0]["version"] if versions else None
    return {"name": "acme/sql", "latest": latest, "versions": list(versions), **changes}


def test_attack_95_what_a_search_prints_cannot_move_the_cursor_or_forge_a_row(
    expertctl: CommandRunner, hostile: Answering
) -> None:
    hit = {"name": EVIL, "version": EVIL, "description": EVIL, "kinds": [EVIL], "base": EVIL}
    hostile({"/api/v1/search": {"results": [hit], "next": None}})
    said = expertctl("search", "x")
    assert len(said.out.splitlines()) == 2
    assert not {"\x1b", "\u202e"} & set(said.out + said.err)


def test_attack_95_what_info_prints_cannot_forge_a_row(
    expertctl: CommandRunner, hostile: Answering, workspace: PackageWorkspace
) -> None:
    manifest = json.loads(read_package(workspace.package()).small["expert.json"])
    manifest |= {"description": EVIL}
    version = version_of(signer=EVIL, yanked=EVIL, published=EVIL)
    hostile(
        {
            "/api/v1/packages/acme/sql": page_of(version, owners=[EVIL], description=EVIL),
            "/api/v1/packages/acme/sql/1.0.0": {**version, "manifest": manifest},
        }
    )
    said = expertctl("info", "acme/sql")
    assert not {"\x1b", "\u202e"} & set(said.out + said.err)
    signed = [line for line in said.out.splitlines() if line.startswith("signed by")]
    assert len(signed) == 1
    assert signed[0].endswith("not trusted here")


@pytest.mark.parametrize(
    "page",
    [
        page_of(version_of(version="../../etc")),
        page_of(version_of(version="1.0")),
        page_of(version_of(content_digest="sha256:../../x")),
        page_of(version_of(), name="acme/other"),
        page_of(version_of(), name=EVIL),
        {"name": "acme/sql", "versions": "all"},
        [],
        {},
    ],
    ids=["path", "partial", "digest", "other", "evil", "text", "list", "empty"],
)
def test_an_answer_about_something_else_is_an_error_of_the_registry(
    page: Any, expertctl: CommandRunner, hostile: Answering
) -> None:
    host = hostile({"/api/v1/packages/acme/sql": page})
    said = expertctl("info", "acme/sql", "--json", exit_code=6)
    assert said.document["error"]["code"] == "registry"
    assert host in said.err
    assert not {"\x1b", "\u202e"} & set(said.err)


def test_a_manifest_that_is_none_is_refused(expertctl: CommandRunner, hostile: Answering) -> None:
    one = version_of()
    answers = {"/api/v1/packages/acme/sql": page_of(one)}
    hostile({**answers, "/api/v1/packages/acme/sql/1.0.0": {**one, "manifest": 3}})
    expertctl("info", "acme/sql", exit_code=6)
    hostile({**answers, "/api/v1/packages/acme/sql/1.0.0": {**one, "manifest": {"x": EVIL}}})
    assert "\x1b" not in expertctl("info", "acme/sql", exit_code=8).err


def test_attack_80_a_login_is_shown_to_no_other_registry(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, home: Path, hostile: Answering,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store_credential(live, home, alice)
    hostile({"/api/v1/search": {"results": []}})
    expertctl("search", "x")
    assert Hostile.logins == [None]
    monkeypatch.setenv("EXPERT_TOKEN", "for-the-one-that-is-set")
    expertctl("search", "x", "--registry", live.host)
    assert Hostile.logins == [None]


def test_a_list_that_never_ends_is_given_up(
    expertctl: CommandRunner, hostile: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expertctl.registry.client.MAX_PAGES", 3)
    hostile({"/api/v1/users": {"users": [], "next": "again"}})
    assert "never ends" in expertctl("registry", "user", "list", exit_code=6).err


def test_a_search_by_nobody_says_that_a_login_may_show_more(
    expertctl: CommandRunner, live: LiveRegistry, published: Path
) -> None:
    expertctl("logout", live.host)
    said = expertctl("search", "--registry", live.host, "nothing-of-it")
    assert f"`expertctl login {live.host}` may show more" in said.err
