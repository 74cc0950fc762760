"""``expertctl trust registry``: accepted by fingerprint or by file, and never by its own word."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli import app
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.registry.live_registry import LiveRegistry, run_live_registry
from tests.trust.forged_bundles import make_rfc_key

KEY = make_rfc_key().public
HOST = "registry.example.com"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "data") as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The index key of a registry, as it was handed over."""
    file = tmp_path / "root.pem"
    file.write_bytes(KEY.pem())
    return file


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert app.run(["trust", *words, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def add(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    return run(capsys, "registry", "add", *words, code=code)


@pytest.mark.parametrize("name", ["list", "add", "remove"])
def test_every_subcommand_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["trust", "registry", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"expertctl trust registry {name}" in text.split("Example")[1]


def test_a_running_registry_is_accepted_by_its_fingerprint(
    live: LiveRegistry, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = live.served.registry.index_key.public.key_id
    expected = {
        "host": live.host,
        "url": live.url,
        "index_key": fingerprint,
        "namespaces": ["acme"],
        "pinned": [],
    }
    given = ("--fingerprint", fingerprint, "--namespace", "acme/*")
    assert add(capsys, live.host, *given) == expected
    known = TrustStore(home / "trust.json").read().find_registry(live.host)
    assert known is not None
    assert known.index_key == live.served.registry.index_key.public
    assert run(capsys, "registry", "list") == {"registries": [expected]}


def test_a_running_registry_with_another_key_is_refused(
    live: LiveRegistry, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = add(capsys, live.url, "--fingerprint", KEY.key_id, code=5)["error"]
    assert "has the index key" in error["message"]
    assert not (home / "trust.json").exists()


def test_a_key_in_a_file_needs_no_network(
    root: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = add(capsys, HOST, "--root", str(root))
    assert (document["host"], document["url"]) == (HOST, f"https://{HOST}")
    assert document["index_key"] == KEY.key_id
    add(capsys, HOST, "--root", str(root), "--fingerprint", KEY.key_id)
    other = f"sha256:{'ab' * 32}"
    error = add(capsys, HOST, "--root", str(root), "--fingerprint", other, code=2)["error"]
    assert KEY.key_id in error["message"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([HOST], 2, "cannot vouch"),
        ([HOST, "--fingerprint", "abc"], 2, "not a fingerprint"),
        (["http://10.0.0.1", "--root", "FILE"], 2, "unencrypted"),
        ([f"https://{HOST}/path", "--root", "FILE"], 2, "not the address"),
        ([HOST, "--root", "FILE", "--namespace", "*"], 2, "not a namespace"),
        ([HOST, "--root", "absent.pem"], 3, "absent.pem"),
        pytest.param(  # tried again for some seconds
            ["127.0.0.1:1", "--fingerprint", KEY.key_id],
            6,
            "127.0.0.1:1",
            marks=pytest.mark.all,
        ),
    ],
)
def test_add_refuses_what_nobody_vouches_for(
    words: list[str],
    code: int,
    message: str,
    root: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(root) if word == "FILE" else word for word in words]
    assert message in add(capsys, *given, code=code)["error"]["message"]
    assert not (home / "trust.json").exists()


def test_offline_a_fingerprint_alone_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXPERT_OFFLINE", "1")
    error = add(capsys, HOST, "--fingerprint", KEY.key_id, code=6)["error"]
    assert "offline" in error["message"]


def test_a_new_key_and_a_moved_namespace_are_told(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, HOST, "--root", str(root), "--namespace", "acme")
    renewed = tmp_path / "renewed.pem"
    renewed.write_bytes(PrivateKey.generate().public.pem())
    assert app.run(["trust", "registry", "add", HOST, "--root", str(renewed)]) == 0
    assert f"{HOST} had another index key before: {KEY.key_id}" in capsys.readouterr().err
    words = ["add", "two.example.com", "--root", str(root), "--namespace", "acme"]
    assert app.run(["trust", "registry", *words]) == 0
    out, err = capsys.readouterr()
    assert f"acme belonged to {HOST} before" in err
    assert out.splitlines() == [f"two.example.com  {KEY.key_id}", "for acme/*"]
    listed = run(capsys, "registry", "list")["registries"]
    assert [(r["host"], r["namespaces"]) for r in listed] == [
        (HOST, []),
        ("two.example.com", ["acme"]),
    ]


def test_remove_forgets_a_registry_and_its_pins(
    root: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, HOST, "--root", str(root))
    trust = TrustStore(home / "trust.json")
    trust.update(lambda record: record.with_pins(HOST, "acme", [KEY]))
    assert run(capsys, "registry", "remove", HOST.upper())["pinned"] == ["acme"]
    assert trust.read().registries == ()
    assert trust.read().keys == ()
    assert run(capsys, "registry", "remove", HOST, code=3)["error"]["code"] == "not_found"


def test_an_empty_list_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["trust", "registry", "list"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "trust registry add URL --fingerprint" in err


def test_keys_are_added_for_one_registry_and_listed_with_it(
    root: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["add", str(root), "--namespace", "acme", "--registry", f"https://{HOST.upper()}"]
    assert app.run(["trust", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"root  {KEY.key_id}",
        f"trusted for acme/* of {HOST}",
    ]
    trust = TrustStore(home / "trust.json")
    assert trust.read().list_registries_for("acme") == (HOST,)
    lost = f"sha256:{'ab' * 32}"
    trust.update(
        lambda record: record.with_registry_revocations(
            HOST, "zoo", [(lost, "lost"), (KEY.key_id, "")]
        )
    )
    add(capsys, HOST, "--root", str(root))
    document = run(capsys, "list")
    assert document["keys"][0]["grants"][0]["registry"] == HOST
    assert document["revoked"][0] == {
        "key_id": lost,
        "reason": "lost",
        "registry": HOST,
        "namespace": "zoo",
    }
    assert [r["host"] for r in document["registries"]] == [HOST]
    assert app.run(["trust", "list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "MAY", "SIGN", "STATE", "KEY", "ID"],
        ["root", "acme/*", "of", HOST, "revoked", "for", "zoo/*", "of", HOST, KEY.key_id],
        ["-", "-", "revoked", "for", "zoo/*", "of", HOST, lost],
        [],
        ["REGISTRY", "NAMESPACES", "PINNED", "INDEX", "KEY"],
        [HOST, "-", "-", KEY.key_id],
    ]


def test_no_registry_is_called_as_files_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["add", str(root), "--namespace", "acme", "--registry", "local"]
    assert "stands for files" in run(capsys, *words, code=2)["error"]["message"]
    error = add(capsys, "local", "--root", str(root), code=2)["error"]
    assert "came from files" in error["message"]


def test_a_file_in_the_working_folder_adds_no_trust(
    root: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Attacks 99 and 104: what lies in a project is not read as trust or settings."""
    add(capsys, HOST, "--root", str(root))
    project = tmp_path / "project"
    project.mkdir()
    evil = TrustStore(project / "trust.json")
    evil.add(KEY, name="evil", namespaces=["acme"])
    for name in ("config.toml", ".expert/config.toml", "expert.toml", "registry.toml"):
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('registry = "https://evil.example"\n')
    monkeypatch.chdir(project)
    document = run(capsys, "list")
    assert document["keys"] == []
    assert [r["host"] for r in document["registries"]] == [HOST]
    assert home.is_dir()
