"""Bases by name: `pull`, `base add MODEL` and `--base MODEL` against a hub in this process."""

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from expertctl.cli import app
from expertctl.errors import format_install_command
from expertctl.install import hub as hub_module
from expertctl.install import hub_connection
from tests.cli.command_runner import CommandOutput, CommandRunner, expertctl
from tests.factories import write_base
from tests.gguf_files import write_gguf
from tests.install.hub_server import (
    COMMIT,
    LATER_COMMIT,
    HubRepository,
    HubServer,
    StatusFault,
    open_user_hub,
)

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

NAME, TOKEN = "acme/tiny", "hf_secretsecretsecret"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
REPO = HubRepository


@pytest.fixture(scope="module")
def base_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("base")
    write_base(folder / "tiny", layers=1, hidden=64, heads=2, kv_heads=1)
    return HubRepository.from_folder(folder / "tiny").files


@pytest.fixture
def hub(
    base_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[HubServer]:
    """A hub with one model, and a user who has a token and an empty cache."""
    with open_user_hub(monkeypatch, tmp_path, token=TOKEN) as server:
        server.repositories[NAME] = HubRepository(dict(base_files))
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The folder of the model in the cache of the hub."""
    return tmp_path / "hf" / "hub" / "models--acme--tiny"


def list_blobs(cache: Path) -> list[str]:
    folder = cache / "blobs"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_model_is_downloaded_into_the_cache_and_registered_there(
    expertctl: CommandRunner, hub: HubServer, cache: Path, base_files: dict[str, bytes]
) -> None:
    said = expertctl("pull", NAME, "--json")
    assert "downloading acme/tiny at c1899de289a0: 124.0 kB, 5 files" in said.err
    shown = said.document
    assert (shown["name"], shown["revision"], shown["copied"]) == (NAME, COMMIT, False)
    assert shown["path"] == str(cache / "snapshots" / COMMIT)
    wanted = {name for name in base_files if name not in {"README.md", "code.py"}}
    assert {path.name for path in Path(shown["path"]).iterdir()} == wanted
    assert shown["downloaded"] == hub.count_sent() == sum(len(base_files[n]) for n in wanted)
    assert (cache / "refs" / "main").read_text() == COMMIT
    assert expertctl("base", "list", "--json").document["bases"][0]["state"] == "ok"


def test_what_the_cache_has_is_used_without_a_byte(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    expertctl("pull", NAME)
    hub.requests.clear()
    said = expertctl("base", "add", NAME, "--json")
    assert said.document["downloaded"] == 0
    assert [request.stage for request in hub.requests] == ["list"]
    assert "is in the cache of the hub; nothing is downloaded" in said.err


def test_what_the_client_of_the_hub_downloaded_is_used(
    expertctl: CommandRunner, hub: HubServer, cache: Path, base_files: dict[str, bytes]
) -> None:
    huggingface_hub.hf_hub_download(
        NAME, WEIGHTS, endpoint=hub.endpoint, cache_dir=cache.parent, revision="main"
    )
    hub.requests.clear()
    shown = expertctl("pull", NAME, "--json").document
    assert hub.count_sent(WEIGHTS) == 0
    assert shown["downloaded"] == shown["size"] - len(base_files[WEIGHTS])


def test_the_client_of_the_hub_uses_what_was_downloaded_here(
    expertctl: CommandRunner, hub: HubServer, cache: Path
) -> None:
    path = Path(expertctl("pull", NAME, "--json").document["path"]) / WEIGHTS
    hub.requests.clear()
    there = huggingface_hub.hf_hub_download(
        NAME, WEIGHTS, endpoint=hub.endpoint, cache_dir=cache.parent, local_files_only=True
    )
    assert (there, hub.requests) == (str(path), [])


def test_a_whole_commit_in_the_cache_needs_no_request(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    expertctl("pull", f"{NAME}@{COMMIT}")
    hub.requests.clear()
    assert expertctl("pull", f"{NAME}@{COMMIT}", "--json").document["downloaded"] == 0
    assert hub.requests == []


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "EXPERT_OFFLINE"])
def test_nothing_is_sent_while_offline(
    variable: str, expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("pull", NAME)
    hub.requests.clear()
    monkeypatch.setenv(variable, "1")
    assert expertctl("pull", NAME, "--json").document["revision"] == COMMIT
    assert "expertctl is offline" in expertctl("pull", "acme/other", exit_code=6).err
    assert hub.requests == []


def test_the_cache_answers_for_a_hub_that_is_down(expertctl: CommandRunner, hub: HubServer) -> None:
    expertctl("pull", NAME)
    hub.faults.answers["list"] = StatusFault(503)
    said = expertctl("pull", NAME, "--json")
    assert "warning: acme/tiny: 127.0.0.1" in said.err
    assert "what the cache has of acme/tiny is used" in said.err
    assert said.document["downloaded"] == 0


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", COMMIT])
def test_a_revision_is_recorded_as_its_commit(
    revision: str, expertctl: CommandRunner, hub: HubServer
) -> None:
    for words in (["pull", f"{NAME}@{revision}"], ["pull", NAME, "--revision", revision]):
        assert expertctl(*words, "--json").document["revision"] == COMMIT


def test_only_the_hub_gets_the_token(expertctl: CommandRunner, hub: HubServer) -> None:
    said = expertctl("-v", "pull", NAME)
    sent = {request.stage: request.headers.get("authorization") for request in hub.requests}
    assert sent == dict.fromkeys(("list", "head", "get"), f"Bearer {TOKEN}") | {"cdn": None}
    hub.faults.answers["list"] = StatusFault(302, {"Location": f"{hub.cdn}/api/x"})
    hub.faults.answers["cdn"] = StatusFault(403)
    hub.requests.clear()
    refused = expertctl("-v", "pull", f"{NAME}@v1", exit_code=6)
    assert [r.headers.get("authorization") for r in hub.requests] == [f"Bearer {TOKEN}", None]
    assert TOKEN not in said.err + said.out + refused.err + refused.out


@pytest.mark.parametrize("is_described", [True, False])
def test_a_redirect_to_another_hub_gets_no_token(
    is_described: bool, expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the hub itself sends its headers to some hosts that it knows."""
    there = ("http", "127.0.0.1", int(hub.cdn.rpartition(":")[2]))
    monkeypatch.setattr("huggingface_hub.utils._http._HUB_ORIGINS", frozenset({there}))

    def describe(headers: dict[str, str]) -> None:
        if "Location" in headers and not is_described:
            del headers["X-Repo-Commit"]

    hub.faults.only, hub.faults.edit_headers = WEIGHTS, describe
    expertctl("pull", NAME)
    authorised = [r.headers["host"] for r in hub.requests if "authorization" in r.headers]
    assert set(authorised) == {hub.endpoint.removeprefix("http://")}
    heads = [r for r in hub.requests if r.stage == "head" and r.name == WEIGHTS]
    assert len(heads) == (1 if is_described else 2)


def test_a_token_with_an_impossible_character_is_refused(
    hub: HubServer, pull: Callable[..., CommandOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sécret")
    pull(2, "the token for the hub has a character that no token has")


def test_without_tls_another_machine_gets_no_token(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("127.0.0.1", "0.0.0.0"))
    said = expertctl("pull", NAME)
    assert "warning: HF_ENDPOINT has no TLS, so 0.0.0.0:" in said.err
    assert {request.headers.get("authorization") for request in hub.requests} == {None}
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("127.0.0.1", "localhost"))
    assert "has no TLS" not in expertctl("pull", NAME).err
    assert hub.requests[-1].headers["authorization"] == f"Bearer {TOKEN}"


def test_an_implicit_token_may_be_switched_off(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    expertctl("pull", NAME)
    assert {request.headers.get("authorization") for request in hub.requests} == {None}


def test_without_a_token_none_is_sent(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    expertctl("pull", NAME)
    assert {request.headers.get("authorization") for request in hub.requests} == {None}


def test_shards_are_downloaded_with_their_index(
    expertctl: CommandRunner, hub: HubServer, base_files: dict[str, bytes]
) -> None:
    files = dict(base_files)
    shard = "model-00001-of-00001.safetensors"
    files[shard] = files.pop(WEIGHTS)
    size = int.from_bytes(files[shard][:8], "little")
    tensors = [n for n in json.loads(files[shard][8 : 8 + size]) if n != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["pytorch_model.bin"] = files["model.fp16.safetensors"] = b"never"
    hub.repositories[NAME] = HubRepository(files)
    folder = Path(expertctl("pull", NAME, "--json").document["path"])
    names = {path.name for path in folder.iterdir()}
    assert {shard, "model.safetensors.index.json"} <= names
    assert not names & {"pytorch_model.bin", "model.fp16.safetensors", "code.py"}


def test_of_gguf_files_only_the_chosen_one_is_downloaded(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories[NAME] = HubRepository(
        {"q4/a-Q4_K_M.gguf": b"4" * 9000, "a-Q8_0.gguf": b"8" * 9000, "README.md": b"x"}
    )
    app.run(["pull", NAME, "--file", "*Q4_K_M.gguf"])
    before = len(hub.requests)
    app.run(["pull", f"{NAME}@{COMMIT}", "--file", "*Q4_K_M.gguf"])
    assert len(hub.requests) == before
    assert hub.count_sent() == hub.count_sent("a-Q4_K_M.gguf") == 9000
    assert (cache / "snapshots" / COMMIT / "q4" / "a-Q4_K_M.gguf").read_bytes() == b"4" * 9000


@pytest.fixture
def with_gguf(base_files: dict[str, bytes], hub: HubServer, tmp_path: Path) -> HubServer:
    """The hub with two GGUF files, beside other large files with names of a base's files."""
    folder = write_base(tmp_path / "whole", layers=1, hidden=64, heads=2, kv_heads=1)
    files = {
        f"{kind}/tiny-{kind}.gguf": write_gguf(tmp_path / "a.gguf", folder, kind=kind).read_bytes()
        for kind in ("F16", "F32")
    }
    files |= {"tokenizer.json": b"x" * 9000, "README.md": b"x", "model.gguf": b"x" * 9000}
    hub.repositories[NAME] = HubRepository(files)
    return hub


@pytest.mark.parametrize("options", [[], ["--copy"]])
def test_a_gguf_file_is_compared_with_its_own_digest(
    options: list[str], expertctl: CommandRunner, with_gguf: HubServer, cache: Path
) -> None:
    words = ["pull", f"{NAME}@{COMMIT}", "--file", "*-F16.gguf", *options]
    assert expertctl(*words, "--json").document["downloaded"] == with_gguf.count_sent()
    expertctl("base", "remove", NAME)
    assert expertctl(*words, "--json").document["downloaded"] == 0
    expertctl("base", "remove", NAME)
    blob = cache / "blobs" / with_gguf.repositories[NAME].etag("F16/tiny-F16.gguf")
    blob.write_bytes(blob.read_bytes()[:-2] + b"\1\1")
    for revision in (NAME, f"{NAME}@{COMMIT}"):
        said = expertctl("pull", revision, "--file", "*-F16.gguf", *options, exit_code=5)
        assert ".gguf differs from what the hub states" in said.err.replace("\n  ", " ")


def test_files_of_the_same_name_in_folders_are_not_compared(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    hub.repositories[NAME].files |= {
        f"onnx/{WEIGHTS}": b"o" * 9000,
        "x/tokenizer.json": b"t" * 9000,
    }
    assert expertctl("pull", NAME, "--json").document["revision"] == COMMIT


def test_a_pinned_commit_is_the_one_that_is_downloaded(
    expertctl: CommandRunner, hub: HubServer, cache: Path
) -> None:
    hub.faults.edit_listing = lambda listing: listing | {"sha": LATER_COMMIT}
    said = expertctl("pull", f"{NAME}@{COMMIT}", "--json", exit_code=6).document["error"]
    assert "the hub answers with commit 9f0c2a77b7b2 of acme/tiny" in said["message"]
    assert not cache.exists()


def test_the_cache_is_searched_by_the_same_rules(
    expertctl: CommandRunner, with_gguf: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("pull", NAME, "--file", "F16/*", "--name", "a")
    expertctl("pull", NAME, "--file", "F32/*", "--name", "b")
    gone = cache / "snapshots" / COMMIT / "x-F99.gguf"
    gone.symlink_to("nowhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert expertctl("pull", NAME, "--file", "F32/*", "--name", "b", "--json").document
    said = expertctl("pull", NAME, "--file", "*.gguf", "--json", exit_code=2).document["error"]
    assert "matches 2 files: F16/tiny-F16.gguf, F32/tiny-F32.gguf" in said["message"]
    expertctl("pull", NAME, "--file", "*F99*", exit_code=6)
    expertctl("pull", NAME, "--file", "*.safetensors", exit_code=6)


def test_other_safetensors_are_refused_before_the_download(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    hub.repositories[NAME].files["model.fp16.safetensors"] = b"x" * 9000
    said = expertctl("pull", NAME, "--file", "*fp16*", "--json", exit_code=2).document["error"]
    assert "model.fp16.safetensors" in said["message"]
    assert hub.count_sent() == 0
    assert expertctl("pull", NAME, "--file", WEIGHTS, "--json").document["revision"] == COMMIT
    hub.requests.clear()
    expertctl("pull", f"{NAME}@{COMMIT}", "--file", WEIGHTS)
    assert hub.requests == []


def test_what_is_known_is_refused_before_the_download(
    expertctl: CommandRunner, with_gguf: HubServer
) -> None:
    expertctl("pull", NAME, "--file", "F16/*")
    with_gguf.requests.clear()
    said = expertctl("pull", NAME, "--file", "F32/*", "--json", exit_code=4).document["error"]
    assert "another base is called acme/tiny" in said["message"]
    assert "with other weights of acme/tiny" in said["message"]
    assert expertctl("pull", NAME, "--file", "F16/*", "--json").document["downloaded"] == 0
    said = expertctl("pull", NAME, "--name", ".x", "--json", exit_code=2).document["error"]
    assert "cannot name a base" in said["message"]
    assert with_gguf.count_sent() == 0


def test_a_copy_that_does_not_fit_is_refused_before_the_download(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, usage = len(hub.repositories[NAME].files[WEIGHTS]), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage(p)._replace(free=size + size // 2))
    said = expertctl("pull", NAME, "--copy", "--json", exit_code=7).document["error"]
    assert "acme/tiny with its copy needs" in said["message"]
    assert hub.count_sent() == 0
    assert expertctl("pull", NAME, "--json").document["revision"] == COMMIT


def test_a_system_without_links_keeps_a_file_once(
    expertctl: CommandRunner, hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "a link needs a privilege")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    shown = expertctl("pull", NAME, "--json").document
    assert not (Path(shown["path"]) / WEIGHTS).is_symlink()
    assert list_blobs(cache) == []
    assert expertctl("pull", NAME, "--json").document["downloaded"] == 0
    blob = cache / "blobs" / hub.repositories[NAME].etag(WEIGHTS)
    (cache / "snapshots" / COMMIT / WEIGHTS).rename(blob)
    assert expertctl("pull", NAME, "--json").document["downloaded"] == 0
    assert blob.read_bytes() == (cache / "snapshots" / COMMIT / WEIGHTS).read_bytes()


def test_a_copy_is_made_of_the_cache_if_it_is_wanted(
    expertctl: CommandRunner, hub: HubServer, home: Path
) -> None:
    shown = expertctl("pull", NAME, "--copy", "--name", "mine", "--json").document
    assert (shown["name"], shown["revision"], shown["copied"]) == ("mine", COMMIT, True)
    assert Path(shown["path"]).is_relative_to(home)


def test_a_directory_is_never_taken_for_a_name(
    expertctl: CommandRunner, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "acme" / "tiny", layers=1, hidden=16, heads=2, kv_heads=1)
    assert expertctl("base", "add", NAME, "--json").document["name"] == "tiny"
    assert hub.requests == []
    assert expertctl("base", "add", f"hf:{NAME}", "--json").document["name"] == NAME
    for path in ("nowhere", "./acme/gone", "../acme/gone", "/acme/gone", "a/b/c", "acme--x/y"):
        assert "no such directory" in expertctl("base", "add", path, exit_code=3).err
    said = expertctl("base", "add", "models/mistyped", exit_code=3).err
    assert "there is no folder models/mistyped either" in said.replace("\n", " ")


def test_pull_takes_a_path_only_if_it_begins_as_one(
    expertctl: CommandRunner, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "acme" / "tiny", layers=1, hidden=16, heads=2, kv_heads=1)
    assert expertctl("pull", NAME, "--json").document["path"] != str(tmp_path / NAME)
    assert expertctl("pull", f"./{NAME}", "--json").document["path"] == str(tmp_path / NAME)
    for text in ("acme", "gpt2", "a/b/c", "x" * 5000):
        error = expertctl("pull", text, "--json", exit_code=2).document["error"]
        assert "does not name a model of a hub" in error["message"]
        assert "a name is ORG/NAME" in error["hint"]
    long = expertctl("base", "add", "x" * 5000, "--json", exit_code=3).document["error"]
    assert "no such directory" in long["message"]


def test_a_moved_revision_is_refused_before_it_is_downloaded(
    expertctl: CommandRunner, hub: HubServer, base_files: dict[str, bytes]
) -> None:
    expertctl("pull", NAME)
    hub.repositories[NAME] = HubRepository(
        {**base_files, WEIGHTS: base_files[WEIGHTS][:-4] + b"\0\0\0\0"}, commit=LATER_COMMIT
    )
    hub.requests.clear()
    said = expertctl("pull", NAME, "--json", exit_code=4).document["error"]
    assert said["message"] == (
        "another base is called acme/tiny: revision c1899de289a0, and main of acme/tiny is "
        "9f0c2a77b7b2 now"
    )
    assert "`expertctl base remove acme/tiny`" in said["hint"]
    assert hub.count_sent() == 0
    shown = expertctl("pull", NAME, "--name", "acme/later", "--json").document
    assert shown["revision"] == LATER_COMMIT
    assert shown["downloaded"] == len(base_files[WEIGHTS]), "the other files are the same"


def test_a_damaged_file_in_the_cache_is_not_registered(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(expertctl("pull", NAME, "--json").document["path"], WEIGHTS).resolve()
    expertctl("base", "remove", NAME)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        said = expertctl("pull", NAME, exit_code=5)
        assert "model.safetensors differs from what the hub states" in said.err
    assert expertctl("base", "list", "--json").document == {"bases": []}


def test_an_unfinished_file_is_completed(
    expertctl: CommandRunner, hub: HubServer, cache: Path, base_files: dict[str, bytes]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.cuts = WEIGHTS, 50_000, 1
    expertctl("pull", NAME)
    ranges = [
        r.headers.get("range") for r in hub.requests if r.stage == "cdn" and WEIGHTS in r.path
    ]
    assert ranges == [None, "bytes=50000-"]
    assert hub.count_sent(WEIGHTS) == len(base_files[WEIGHTS])
    assert not [name for name in list_blobs(cache) if "incomplete" in name]


def test_short_names_are_listed_and_stand_for_repositories(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    rows = expertctl("base", "search", "--json").document["models"]
    assert 12 <= len(rows) <= 20
    assert len({row["name"] for row in rows}) == len({row["model"] for row in rows}) == len(rows)
    assert expertctl("base", "search", "0.6B").out.splitlines()[1].split()[:2] == [
        "qwen3:0.6b",
        "Qwen/Qwen3-0.6B",
    ]
    nothing = expertctl("base", "search", "zzz")
    assert nothing.out == ""
    assert "no short name contains 'zzz'" in nothing.err
    files = hub.repositories[NAME].files
    hub.repositories["HuggingFaceTB/SmolLM2-135M-Instruct"] = HubRepository(dict(files))
    for short in ("smollm2", "SmolLM2:135m"):
        shown = expertctl("pull", short, "--json").document
        assert shown["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


# What goes wrong, with the exit code and a word of the message.


@pytest.fixture
def pull(expertctl: CommandRunner, hub: HubServer) -> Callable[[int, str], CommandOutput]:
    """Run `pull acme/tiny`, and require an exit code and words on stderr, hub's texts not."""

    def run(code: int, words: str, *more: str) -> CommandOutput:
        said = expertctl("pull", NAME, *more, "--json", exit_code=code)
        error = said.document.get("error", {"message": "", "hint": ""})
        assert words in error["message"], error
        assert error["hint"] or code in {0, 1, 8}, "the way out"
        assert "hub text" not in said.err
        assert TOKEN not in said.err + said.out
        return said

    return run


GATED = {"X-Error-Code": "GatedRepo"}
BAD_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
DISABLED = {"X-Error-Message": "Access to this resource is disabled."}


@pytest.mark.parametrize(
    ("stage", "fault", "code", "words"),
    [
        ("list", StatusFault(401), 3, "has no model acme/tiny, or shows it only"),
        ("list", StatusFault(404), 3, "has no model acme/tiny"),
        ("list", StatusFault(401, BAD_TOKEN), 6, "does not accept the token"),
        ("list", StatusFault(403, GATED), 6, "acme/tiny is gated"),
        ("list", StatusFault(401, GATED), 6, "acme/tiny is gated"),
        ("list", StatusFault(403, DISABLED), 6, "has disabled acme/tiny"),
        ("list", StatusFault(403), 6, "refuses access"),
        ("list", StatusFault(404, {"X-Error-Code": "RevisionNotFound"}), 3, "no revision main"),
        ("list", StatusFault(429), 6, "too many requests"),
        ("list", StatusFault(500), 6, "cannot answer now (HTTP 500)"),
        ("list", StatusFault(418), 6, "refuses the request (HTTP 418)"),
        ("list", StatusFault(200, body=b"<html>"), 6, "is not that of a hub"),
        ("list", StatusFault(200, body=b"\xff\xfe"), 6, "is not that of a hub"),
        ("list", StatusFault(302, {"Location": "/api/again"}), 6, "redirects too often"),
        ("list", StatusFault(302, {"Location": "ftp://127.0.0.1/x"}), 6, "without TLS"),
        ("list", StatusFault(302, {"Location": "http://[bad"}), 6, "is not that of a hub"),
        ("list", StatusFault(302, {"Location": "http://x:y/"}), 6, "is not that of a hub"),
        ("list", StatusFault(200, {"Content-Encoding": "gzip"}), 6, "is not that of a hub"),
        ("head", StatusFault(302, {"Location": "/again"}), 6, "redirects too often"),
        ("head", StatusFault(302, {"Location": "http://[bad"}), 6, "is not that of a hub"),
        ("head", StatusFault(403, GATED), 6, "acme/tiny is gated"),
        ("head", StatusFault(401, BAD_TOKEN), 6, "does not accept the token"),
        ("head", StatusFault(404, {"X-Error-Code": "EntryNotFound"}), 6, "lists a file that it"),
        ("head", StatusFault(429), 6, "too many requests"),
        ("head", StatusFault(503), 6, "cannot answer now (HTTP 503)"),
        ("head", StatusFault(200), 6, "does not say which config.json it has"),
        ("get", StatusFault(403), 6, "refuses access"),
        ("get", StatusFault(503), 6, "cannot answer now (HTTP 503)"),
        ("get", StatusFault(429), 6, "too many requests"),
        ("get", StatusFault(416), 6, "refuses the request (HTTP 416)"),
        ("cdn", StatusFault(403), 6, "refuses access"),
        ("cdn", StatusFault(404), 6, "refuses the request (HTTP 404)"),
        ("cdn", StatusFault(504), 6, "cannot answer now (HTTP 504)"),
    ],
)
def test_a_status_is_explained(
    stage: Any,
    fault: StatusFault,
    code: int,
    words: str,
    hub: HubServer,
    pull: Callable[..., CommandOutput],
    cache: Path,
) -> None:
    hub.faults.answers[stage] = fault
    pull(code, words)
    assert not (cache / "refs").exists()


def edit(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change the first file of a listing."""

    def change(listing: dict[str, Any]) -> dict[str, Any]:
        listing["siblings"][0].update(changes)
        return listing

    return change


LISTINGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda found: [found], "is not that of a hub"),
    "no commit": (lambda found: {"siblings": []}, "is not that of a hub"),
    "a branch": (lambda found: {**found, "sha": "main"}, "names no commit"),
    "a path": (lambda found: {**found, "sha": "../" * 13 + "x"}, "names no commit"),
    "too many": (
        lambda found: {**found, "siblings": found["siblings"][:1] * 20_001},
        "too many files",
    ),
    "no size": (edit(size=None, lfs=None), "is not stated"),
    "negative": (edit(size=-1, lfs=None), "is not stated"),
    "text size": (edit(size="1"), "is not that of a hub"),
    "digest": (edit(lfs={"sha256": "../x", "size": 9}), "digest of"),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_a_listing_is_checked_before_it_is_used(
    case: str, hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    hub.faults.edit_listing, words = LISTINGS[case]
    said = pull(6, words)
    assert [request.stage for request in hub.requests] == ["list"]
    assert "\x1b" not in said.err


def test_a_name_that_may_not_be_written_is_none_of_the_base(
    hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    def append(listing: dict[str, Any]) -> dict[str, Any]:
        bad = {"rfilename": "../../evil.gguf", "size": 1, "blobId": "0" * 40}
        return {**listing, "siblings": [*listing["siblings"], bad]}

    hub.faults.edit_listing = append
    pull(2, "matches no file", "--file", "*evil*")
    pull(0, "")
    assert not [request for request in hub.requests if "evil" in request.path]


def test_a_listing_without_end_is_refused(
    hub: HubServer, pull: Callable[..., CommandOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_connection, "_MAX_LISTING", 100)
    pull(6, "is too large")


HEADERS: dict[str, tuple[dict[str, str], int, str]] = {
    "etag": ({"X-Linked-Etag": f'"{"0" * 64}"'}, 5, "the hub listed: other content"),
    "size": ({"X-Linked-Size": "7"}, 5, "the hub listed: another size"),
    "no number": ({"X-Linked-Size": "seven"}, 0, ""),
    "commit": ({"X-Repo-Commit": LATER_COMMIT}, 6, "does not say which model.safetensors"),
    "path": ({"X-Linked-Etag": '"../../../evil"'}, 6, "does not say which model.safetensors"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_what_a_hub_says_about_a_file_must_fit_its_listing(
    case: str, hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    changed, code, words = HEADERS[case]
    hub.faults.only, hub.faults.edit_headers = WEIGHTS, lambda headers: headers.update(changed)
    pull(code, words)
    assert (hub.count_sent(WEIGHTS) == 0) is bool(code)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_file_with_other_content_is_thrown_away(
    name: str, hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    hub.faults.only, hub.faults.edit_bytes = name, lambda data: b"\0" + data[1:]
    pull(5, f"{name} is not the file that the hub listed: other content")
    assert not [n for n in list_blobs(cache) if n.startswith(hub.repositories[NAME].etag(name))]
    hub.faults.edit_bytes = None
    pull(0, "")


def test_more_bytes_than_stated_are_not_written(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path, base_files: dict[str, bytes]
) -> None:
    hub.faults.only, hub.faults.edit_bytes = WEIGHTS, lambda data: data + b"x" * 5_000_000
    pull(6, "sends more than the")
    assert sum(path.stat().st_size for path in (cache / "blobs").iterdir()) < 130_000


def test_a_connection_that_always_breaks_ends_the_download(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    hub.faults.only, hub.faults.cut_after = WEIGHTS, 0
    said = pull(6, "the connection to 127.0.0.1")
    assert "repeat the command: it goes on" in said.document["error"]["hint"]


@pytest.mark.parametrize("no_length", [False, True])
def test_a_connection_that_breaks_again_and_again_gets_there(
    no_length: bool, hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.no_length = WEIGHTS, 20_000, no_length
    pull(0, "")
    assert sum(r.stage == "cdn" and WEIGHTS in r.path for r in hub.requests) == 6


def test_an_end_without_a_length_is_no_whole_file(
    hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.no_length = WEIGHTS, 0, True
    pull(6, "model.safetensors ended after 0 of")


def test_a_hub_without_ranges_sends_a_file_again(
    hub: HubServer, pull: Callable[..., CommandOutput], base_files: dict[str, bytes]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.cuts = WEIGHTS, 50_000, 1
    hub.faults.no_ranges = True
    pull(0, "")
    assert hub.count_sent(WEIGHTS) == 50_000 + len(base_files[WEIGHTS])


def test_another_part_than_asked_for_is_refused(
    hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    hub.faults.only, hub.faults.cut_after, hub.faults.cuts = WEIGHTS, 50_000, 1
    hub.faults.edit_range = lambda headers: headers.update({"Content-Range": "bytes 0-9/10"})
    pull(6, "sends another part of model.safetensors")


def without(*names: str, **more: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: {n: d for n, d in files.items() if n not in names} | more


def with_config(**changes: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: {**files, CONFIG: json.dumps(json.loads(files[CONFIG]) | changes).encode()}


INDEX = b'{"metadata": {}, "weight_map": {"x": "model-00002-of-00002.safetensors"}}'
REPOSITORIES: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], int, str]] = {
    "empty": (lambda files: {}, 4, "has no weights"),
    "no configuration": (without(CONFIG), 4, "has no config.json"),
    "adapter": (
        without(CONFIG, **{"adapter_config.json": b"{}"}), 4, "has no config.json",
    ),
    "no tokenizer": (without("tokenizer.json"), 4, "has no tokenizer.json"),
    "only pickles": (without(WEIGHTS, **{"pytorch_model.bin": b"x"}), 4, "only as pickles"),
    "only GGUF": (without(WEIGHTS, **{"a.gguf": b"x"}), 2, "has only GGUF files: a.gguf"),
    "only other variants": (
        without(WEIGHTS, **{"model.fp16.safetensors": b"x"}), 4, "has no weights",
    ),
    "another architecture": (
        with_config(model_type="bert", architectures=["BertForMaskedLM"]), 4, "bert",
    ),
    "remote code": (with_config(model_type="new", auto_map={"A": "code.C"}), 4, "auto_map"),
    "malformed": (with_config(hidden_size="x"), 8, "hidden_size"),
    "a shard is missing": (
        without(
            WEIGHTS,
            **{
                "model-00001-of-00002.safetensors": b"x",
                "model.safetensors.index.json": INDEX,
            },
        ),
        4,
        "lacks some of its weight files: it has 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REPOSITORIES)
def test_what_makes_no_base_is_refused_without_its_weights(
    case: str, hub: HubServer, pull: Callable[..., CommandOutput], base_files: dict[str, bytes]
) -> None:
    change, code, words = REPOSITORIES[case]
    hub.repositories[NAME] = HubRepository(change(dict(base_files)))
    pull(code, words)
    assert hub.count_sent(WEIGHTS) == 0
    assert not [r for r in hub.requests if r.name.endswith((".py", ".bin"))]


GGUFS = {"a-Q4_0.gguf": b"4", "b/a-Q8_0.gguf": b"8", "x.bin": b"x"}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*Q5*", "matches no file"),
        ("*.bin", "names no safetensors and no GGUF"),
        ("*.gguf", "matches 2 files: a-Q4_0.gguf, b/a-Q8_0.gguf"),
        ("*a*", "matches 2 files"),
    ],
)
def test_a_pattern_must_name_the_weights(
    pattern: str, words: str, hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    hub.repositories[NAME] = HubRepository(dict(GGUFS))
    pull(2, words, "--file", pattern)
    assert hub.count_sent() == 0


def test_a_download_that_does_not_fit_on_the_disk_is_not_begun(
    hub: HubServer, pull: Callable[..., CommandOutput]
) -> None:
    def enlarge(listing: dict[str, Any]) -> dict[str, Any]:
        for entry in listing["siblings"]:
            if entry["rfilename"] == WEIGHTS:
                entry["lfs"]["size"] = 1 << 49
        return listing

    hub.faults.edit_listing = enlarge
    pull(7, "acme/tiny needs 562.9 TB, and")
    assert hub.count_sent() == 0


def test_a_cache_that_cannot_be_written_is_named(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("no folder")
    pull_code = app.run(["pull", NAME])
    assert pull_code == 1


def test_a_file_that_another_process_downloads_is_left_to_it(
    hub: HubServer,
    pull: Callable[..., CommandOutput],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from filelock import FileLock

    monkeypatch.setattr(hub_module, "_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(hub_module, "_LONG_LOCK_SECONDS", 0.0)
    locks = cache.parent / ".locks" / cache.name
    locks.mkdir(parents=True)
    lock = FileLock(locks / f"{hub.repositories[NAME].etag(WEIGHTS)}.lock", thread_local=False)
    with lock:
        said = pull(1, "another process still downloads acme/tiny")
    assert "another process downloads acme/tiny; waiting for it" in said.err
    monkeypatch.setattr(hub_module, "_LONG_LOCK_SECONDS", 60.0)
    lock.acquire()

    def release(text: str) -> None:
        if "waiting for it" in text:
            lock.release()

    monkeypatch.setattr("expertctl.cli.hub.note", release)
    pull(0, "")


def test_nothing_of_a_complete_cache_is_written(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    pull(0, "")
    before = {path: path.lstat() for path in cache.rglob("*")}
    pull(0, "")
    assert {path: path.lstat().st_mtime_ns for path in cache.rglob("*")} == {
        path: status.st_mtime_ns for path, status in before.items()
    }


def test_a_revision_that_cannot_be_recorded_is_a_warning(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    hub.repositories[NAME].revisions |= {"a", "a/b"}
    pull(0, "", "--revision", "a")
    said = pull(0, "", "--revision", "a/b")
    assert "warning: the cache of the hub was not updated" in said.err
    assert (cache / "refs" / "a").read_text() == COMMIT


def test_a_cache_that_cannot_be_used_is_named_with_its_variable(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    cache.mkdir(parents=True)
    (cache / "blobs").write_text("no folder")
    assert "HF_HOME" in pull(1, str(cache / "blobs")).document["error"]["hint"]


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_was_planted_for_an_unfinished_file_is_not_written(
    kind: str, hub: HubServer, pull: Callable[..., CommandOutput], cache: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (cache / "blobs").mkdir(parents=True)
    place = cache / "blobs" / f"{hub.repositories[NAME].etag(WEIGHTS)}.incomplete"
    match kind:
        case "link":
            place.symlink_to(victim)
        case "hard link":
            place.hardlink_to(victim)
        case _:
            os.mkfifo(place)
    assert "remove it" in pull(1, "is not a regular file").document["error"]["hint"]
    assert victim.read_text() == "mine"


def test_a_damaged_file_of_git_is_refused(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    pull(0, "")
    place = cache / "snapshots" / COMMIT / "tokenizer_config.json"
    place.resolve().write_bytes(place.read_bytes() + b" ")
    said = pull(5, "tokenizer_config.json in the cache is not the file that the hub listed")
    assert str(place.resolve()) in said.document["error"]["hint"]
    place.resolve().unlink()
    pull(0, "")
    assert place.is_file()


def test_a_dangling_link_is_replaced(
    hub: HubServer, pull: Callable[..., CommandOutput], cache: Path
) -> None:
    place = cache / "snapshots" / COMMIT / WEIGHTS
    place.parent.mkdir(parents=True)
    place.symlink_to("../../blobs/gone")
    pull(0, "")
    assert place.read_bytes() == hub.repositories[NAME].files[WEIGHTS]


def test_a_partial_snapshot_of_another_program_is_completed(
    hub: HubServer,
    pull: Callable[..., CommandOutput],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (CONFIG, "tokenizer.json", WEIGHTS):
        huggingface_hub.hf_hub_download(
            NAME, name, endpoint=hub.endpoint, cache_dir=cache.parent, revision=COMMIT
        )
    pinned = ("--revision", COMMIT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = pull(0, "", *pinned, "--name", "partial")
    assert "the cache may lack files of acme/tiny" in said.err.replace("\n  ", " ")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.faults.answers["list"] = StatusFault(503)
    assert "what the cache has" in pull(0, "", *pinned, "--name", "partial").err
    hub.faults.answers.clear()
    pull(0, "", *pinned)
    assert (cache / "snapshots" / COMMIT / "tokenizer_config.json").is_file()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "may lack" not in pull(0, "", *pinned).err


def test_a_hub_that_is_not_there_is_named(
    hub: HubServer, pull: Callable[..., CommandOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://user:pw@127.0.0.1:{taken.getsockname()[1]}")
        said = pull(6, "the connection to 127.0.0.1")
    assert "pw" not in said.err
    for address in ("nonsense", "ftp://127.0.0.1", "http://", "http://[x", "http://x:y"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        pull(2, "is not the address of a hub")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["base", "add", "hf:../x"], "does not name a model of a hub"),
        (["base", "add", "hf:a/b/c"], "does not name a model of a hub"),
        (["pull", f"{NAME}@a..b"], "cannot be a revision"),
        (["pull", f"{NAME}@../x"], "cannot be a revision"),
        (["pull", f"{NAME}@"], "cannot be a revision"),
        (["pull", NAME, "--revision", "a b"], "cannot be a revision"),
        (["pull", f"{NAME}@v1", "--revision", "v1"], "name two revisions"),
        (["base", "add", "./x", "--file", "*.gguf"], "--file chooses among the files of a hub"),
    ],
)
def test_an_impossible_name_is_a_usage_error(
    words: list[str], text: str, expertctl: CommandRunner, hub: HubServer
) -> None:
    assert text in expertctl(*words, "--json", exit_code=2).document["error"]["message"]
    assert hub.requests == []


def test_without_the_client_of_the_hub_the_extra_is_named(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("pull", NAME)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = expertctl("pull", NAME, exit_code=3).err.replace("\n  ", " ")
    assert "downloaded by huggingface_hub, which is not installed" in said
    assert format_install_command("hub") in said
    assert expertctl("pull", f"{NAME}@{COMMIT}", "--json").document["downloaded"] == 0


def test_a_base_of_a_hub_is_not_downloaded_unasked(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    for name in (NAME, f"hf:{NAME}"):
        said = expertctl("route", "x", "--base", name, "--json", exit_code=3)
        hint = f"`expertctl pull {name}` downloads it, if a hub has it"
        assert said.document["error"]["hint"] == hint
    expertctl("pull", NAME)
    hub.requests.clear()
    hint = expertctl("route", "x", "--base", "acme/tiny2", "--json", exit_code=3).document["error"]
    assert hint["hint"].startswith("did you mean acme/tiny? ")
    assert hint["hint"].endswith("; or download it: `expertctl pull acme/tiny2`")
    assert hub.requests == []


def test_a_base_in_the_cache_is_registered_when_it_is_named(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    expertctl("pull", NAME)
    expertctl("base", "remove", NAME)
    hub.requests.clear()
    said = expertctl("route", "x", "--base", NAME)
    assert "registered the base acme/tiny" in said.err
    assert "registered" not in expertctl("route", "x", "--base", f"hf:{NAME}@{COMMIT}").err
    assert hub.requests == []
