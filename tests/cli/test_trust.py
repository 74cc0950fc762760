"""``expertctl trust``: whose keys count, shown and changed from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli import app
from expertctl.reference import Digest
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.trust.forged_bundles import make_rfc_key

KEY = make_rfc_key().public


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """The public key of a publisher, as it was handed over."""
    file = tmp_path / "acme.pub.pem"
    file.write_bytes(KEY.pem())
    return file


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert app.run(["trust", *words, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.parametrize("name", ["list", "add", "remove"])
def test_every_subcommand_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["trust", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"expertctl trust {name}" in text.split("Example")[1]
    assert "--json" in text


def test_add_trusts_a_key_under_the_name_of_its_file(
    acme: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_json(capsys, "add", str(acme), "--namespace", "acme/*")
    assert document == {
        "name": "acme",
        "algorithm": "ecdsa-p256",
        "key_id": KEY.key_id,
        "grants": [{"namespace": "acme", "content_digests": None, "registry": None}],
    }
    assert TrustStore(home / "trust.json").find_key("acme").key == KEY


def test_add_says_all_that_the_key_may_sign_now(
    acme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["trust", "add", str(acme), "--namespace", "acme", "--name", "partner"]) == 0
    assert app.run(["trust", "add", str(acme), "--namespace", "zoo", "--name", "partner"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"partner  {KEY.key_id}",
        "trusted for acme/*",
        f"partner  {KEY.key_id}",
        "trusted for acme/*, zoo/*",
    ]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["FILE"], 2, "--namespace"),
        (["FILE", "--namespace", "*"], 2, "'*' is not a namespace"),
        (["FILE", "--namespace", "acme/sql"], 2, "is not a namespace"),
        (["FILE", "--namespace", "acme", "--name", "A"], 2, "cannot name a key"),
        (["absent.pem", "--namespace", "acme"], 3, "absent.pem"),
    ],
)
def test_add_refuses_what_is_not_exact(
    words: list[str],
    code: int,
    message: str,
    acme: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(acme) if word == "FILE" else word for word in words]
    assert message in run_json(capsys, "add", *given, code=code)["error"]["message"]
    assert not (home / "trust.json").exists()


def test_add_asks_for_a_name_when_the_file_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Acme Key.pem"
    file.write_bytes(KEY.pem())
    error = run_json(capsys, "add", str(file), "--namespace", "acme", code=2)["error"]
    assert "--name" in error["hint"]
    run_json(capsys, "add", str(file), "--namespace", "acme", "--name", "acme")


def test_a_private_key_is_not_taken_for_a_publisher(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "acme.pem"
    file.write_bytes(make_rfc_key().pem())
    error = run_json(capsys, "add", str(file), "--namespace", "acme", code=8)["error"]
    assert "private key" in error["message"]
    assert "keys import" in error["hint"]
    assert not (home / "trust.json").exists()


def test_list_shows_keys_limits_and_revocations(
    acme: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "add", str(acme), "--namespace", "acme")
    store = TrustStore(home / "trust.json")
    starter = PrivateKey.generate("ed25519").public
    content = str(Digest.compute(b"content"))
    store.add(starter, name="starter", namespaces=["starter"], content_digests=[content])
    store.revoke(KEY.key_id, "stolen")
    store.revoke(f"sha256:{'ab' * 32}", "")
    document = run_json(capsys, "list")
    assert [(k["name"], k["revoked"]) for k in document["keys"]] == [
        ("acme", True),
        ("starter", False),
    ]
    assert document["keys"][1]["grants"] == [
        {"namespace": "starter", "content_digests": [content], "registry": None}
    ]
    everywhere = {"registry": None, "namespace": None}
    assert document["revoked"] == [
        {"key_id": KEY.key_id, "reason": "stolen", **everywhere},
        {"key_id": f"sha256:{'ab' * 32}", "reason": "", **everywhere},
    ]
    assert app.run(["trust", "list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "MAY", "SIGN", "STATE", "KEY", "ID"],
        ["acme", "acme/*", "revoked", KEY.key_id],
        ["starter", "starter/*", "(1", "content)", "ok", starter.key_id],
        ["-", "-", "revoked", f"sha256:{'ab' * 32}"],
    ]


def test_an_empty_list_is_an_empty_document_and_a_note(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys, "list") == {"keys": [], "revoked": [], "registries": []}
    assert app.run(["trust", "list"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "trust add FILE" in err
    assert not home.exists()


@pytest.mark.parametrize("by", ["name", "id"])
def test_remove_forgets_a_key_by_name_or_id(
    by: str, acme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "add", str(acme), "--namespace", "acme")
    removed = run_json(capsys, "remove", "acme" if by == "name" else KEY.key_id)
    assert removed["key_id"] == KEY.key_id
    assert run_json(capsys, "list") == {"keys": [], "revoked": [], "registries": []}
    assert run_json(capsys, "remove", "acme", code=3)["error"]["code"] == "not_found"


def test_a_revocation_outlives_remove_and_bars_add(
    acme: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_json(capsys, "add", str(acme), "--namespace", "acme")
    TrustStore(home / "trust.json").revoke(KEY.key_id, "stolen")
    run_json(capsys, "remove", "acme")
    error = run_json(capsys, "add", str(acme), "--namespace", "acme", code=5)["error"]
    assert error["code"] == "revoked"
    assert "stolen" in error["message"]
    assert "replaces it" in error["hint"]


def test_a_damaged_record_names_itself_and_the_way_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "trust.json").write_text('{"schema": 1}')
    (home / "trust.json").chmod(0o600)
    error = run_json(capsys, "list", code=8)["error"]
    assert "trust.json" in error["message"]
    assert "restore" in error["hint"]
