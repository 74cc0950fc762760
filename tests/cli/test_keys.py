"""``expertctl keys``: what is printed, with which exit code, and what lies on the disk after."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli import app
from expertctl.trust.keys import KeyRing, PrivateKey, PublicKey
from expertctl.trust.trust_store import TrustStore
from tests.trust.forged_bundles import make_rfc_key

SUBCOMMANDS = ["new", "import", "grant", "list", "export", "revoke"]
RFC_ID = make_rfc_key().public.key_id


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert app.run(["keys", *words, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["keys", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"expertctl keys {name}" in text.split("Example")[1]
    assert "--json" in text


def test_new_makes_a_key_that_is_trusted_and_guarded(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_json(capsys, "new", "me", "--namespace", "acme", "--namespace", "zoo/*")
    key = KeyRing(home / "keys").read_public("me")
    assert document == {
        "name": "me",
        "algorithm": "ecdsa-p256",
        "key_id": key.key_id,
        "namespaces": ["acme", "local", "zoo"],
        "path": str(home / "keys" / "me.pem"),
    }
    assert TrustStore(home / "trust.json").find_key("me").key == key
    assert stat.S_IMODE((home / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "keys" / "me.pem").stat().st_mode) == 0o600


def test_new_says_what_the_key_is_trusted_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["keys", "new", "me", "--algorithm", "ed25519"]) == 0
    out, err = capsys.readouterr()
    key = KeyRing(home / "keys").read_public("me")
    assert key.algorithm == "ed25519"
    assert out.splitlines() == [
        f"me  {key.key_id}",
        "trusted for local/*",
        f"stored in {home / 'keys' / 'me.pem'}",
    ]
    assert err == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["new", "Me"], 2, "'Me' cannot name a key"),
        (["new", "../me"], 2, "cannot name a key"),
        (["new", "me", "--namespace", "*"], 2, "'*' is not a namespace"),
        (["new", "me", "--namespace", "acme/sql"], 2, "is not a namespace"),
        (["new", "me", "--algorithm", "rsa"], 2, "rsa"),
        (["new"], 2, "NAME"),
        (["export", "me"], 3, "no key 'me'"),
        (["revoke", "me"], 3, "no key is called 'me'"),
        (["revoke", "sha256:short"], 2, "is not a key id"),
        (["import", "me", "absent.pem"], 3, "absent.pem"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    words: list[str], code: int, message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = run_json(capsys, *words, code=code)["error"]
    assert message in error["message"]
    assert not (home / "trust.json").exists()
    assert not (home / "keys").exists()


def test_a_name_is_taken_once(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_json(capsys, "new", "me")
    error = run_json(capsys, "new", "me", code=2)["error"]
    assert "exists already" in error["message"]
    assert "nothing was overwritten" in error["hint"]
    assert run_json(capsys, "list")["keys"][0]["key_id"] == first["key_id"]


def test_list_shows_every_key_with_its_state(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "new", "me", "--namespace", "acme")
    run_json(capsys, "new", "old", "--algorithm", "ed25519")
    run_json(capsys, "revoke", "old", "--reason", "lost")
    listed = run_json(capsys, "list")["keys"]
    assert [(k["name"], k["algorithm"], k["namespaces"], k["revoked"]) for k in listed] == [
        ("me", "ecdsa-p256", ["acme", "local"], False),
        ("old", "ed25519", ["local"], True),
    ]
    assert app.run(["keys", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "ALGORITHM", "STATE", "NAMESPACES", "KEY", "ID"]
    assert lines[1].split() == ["me", "ecdsa-p256", "ok", "acme", "local", listed[0]["key_id"]]
    assert lines[2].split() == ["old", "ed25519", "revoked", "local", listed[1]["key_id"]]


def test_an_empty_list_is_an_empty_document_and_a_note(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys, "list") == {"keys": []}
    assert app.run(["keys", "list"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "keys new NAME" in err
    assert not home.exists()


def test_export_prints_the_public_half_alone(capsys: pytest.CaptureFixture[str]) -> None:
    key_id = run_json(capsys, "new", "me")["key_id"]
    assert app.run(["keys", "export", "me"]) == 0
    out = capsys.readouterr().out
    assert PublicKey.from_pem(out.encode()).key_id == key_id
    assert "PRIVATE" not in out
    document = run_json(capsys, "export", "me")
    assert document["key_id"] == key_id
    assert document["public_key"] == out


def test_export_writes_new_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_id = run_json(capsys, "new", "me")["key_id"]
    public, secret = tmp_path / "me.pub.pem", tmp_path / "me.pem"
    assert run_json(capsys, "export", "me", "-o", str(public))["path"] == str(public)
    assert PublicKey.from_pem(public.read_bytes()).key_id == key_id
    run_json(capsys, "export", "me", "--private", "-o", str(secret))
    assert PrivateKey.from_pem(secret.read_bytes()).public.key_id == key_id
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for words in (["-o", str(public)], ["--private", "-o", str(secret)]):
        assert (
            "exists already" in run_json(capsys, "export", "me", *words, code=2)["error"]["message"]
        )


def test_a_secret_is_never_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app.run(["keys", "new", "me"])
    assert app.run(["keys", "export", "me", "--private"]) == 2
    assert app.run(["keys", "export", "me", "--private", "--json"]) == 2
    assert app.run(["keys", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    secret = (home / "keys" / "me.pem").read_text().splitlines()[1]
    assert secret not in out + err
    assert "-o FILE" in err


def test_import_takes_a_key_in_and_trusts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(make_rfc_key().pem())
    document = run_json(capsys, "import", "work", str(file), "--namespace", "acme")
    assert (document["key_id"], document["namespaces"]) == (RFC_ID, ["acme", "local"])
    assert run_json(capsys, "list")["keys"][0]["name"] == "work"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a key", "0 PEM blocks"),
        (make_rfc_key().public.pem(), "this is a public key"),
        (b"\xff" * 100_000, "too many"),
    ],
)
def test_import_refuses_what_is_no_private_key(
    data: bytes, message: str, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(data)
    error = run_json(capsys, "import", "work", str(file), code=8)["error"]
    assert message in error["message"]
    assert "key.pem" in error["message"]
    assert not (home / "keys").exists()


def test_revoke_is_final(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(make_rfc_key().pem())
    assert run_json(capsys, "revoke", RFC_ID, "--reason", "leaked") == {
        "key_id": RFC_ID,
        "reason": "leaked",
    }
    error = run_json(capsys, "import", "work", str(file), code=5)["error"]
    assert error["code"] == "revoked"
    assert "leaked" in error["message"]


def test_a_key_that_others_can_read_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "new", "me")
    (home / "keys" / "me.pem").chmod(0o644)
    error = run_json(capsys, "list", code=5)["error"]
    assert "others may read" in error["message"]
    assert "chmod 600" in error["hint"]


def test_a_read_only_home_is_an_error_without_traceback(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_text("a file where the folder should be")
    assert app.run(["keys", "new", "me"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_the_public_half_can_be_piped(home: Path) -> None:
    program = Path(sys.executable).with_name("expertctl")
    environment = {"EXPERT_HOME": str(home), "PATH": ""}
    for words in (["new", "me"], ["export", "me"]):
        done = subprocess.run(
            [program, "keys", *words], env=environment, capture_output=True, check=True
        )
    assert PublicKey.from_pem(done.stdout) == KeyRing(home / "keys").read_public("me")


def test_a_key_is_granted_more_namespaces(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "new", "me", "--namespace", "acme")
    words = ("grant", "me", "--namespace", "zoo", "--namespace", "b/*", "--namespace", "acme")
    document = run_json(capsys, *words)
    assert document["namespaces"] == ["acme", "b", "local", "zoo"]
    assert document["path"] == str(home / "keys" / "me.pem")
    trusted = TrustStore(home / "trust.json").find_key("me")
    assert trusted.namespaces == ("acme", "b", "local", "zoo")
    assert run_json(capsys, "list")["keys"][0]["namespaces"] == ["acme", "b", "local", "zoo"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["grant", "you", "--namespace", "acme"], 3, "no key 'you'"),
        (["grant", "me"], 2, "--namespace is missing"),
        (["grant", "me", "--namespace", "*"], 2, "'*' is not a namespace"),
        (["grant", "me", "--namespace", "acme/sql"], 2, "'acme/sql' is not a namespace"),
        (["grant", "../me", "--namespace", "acme"], 2, "cannot name a key"),
    ],
)
def test_a_grant_that_is_refused_changes_nothing(
    words: list[str], code: int, message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "new", "me")
    before = (home / "trust.json").read_bytes()
    assert message in run_json(capsys, *words, code=code)["error"]["message"]
    assert (home / "trust.json").read_bytes() == before


def test_a_revoked_key_is_granted_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "new", "me")
    run_json(capsys, "revoke", "me", "--reason", "stolen")
    error = run_json(capsys, "grant", "me", "--namespace", "acme", code=5)["error"]
    assert (error["code"], "stolen" in error["message"]) == ("revoked", True)
