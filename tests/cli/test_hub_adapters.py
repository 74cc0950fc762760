"""Adapters by name: `build ORG/NAME` and `install hf:ORG/NAME` against a hub in this process."""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_lora
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

NAME, BASE = "Acme.AI/my_LoRA", "acme/tiny"
PACKAGE = "hf/acme-ai-my-lora"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("folders")
    base = write_base(folder / "tiny", layers=1)
    made = {"base": base}
    for seed in (0, 1):
        named = {"base_model_name_or_path": BASE, "seed": seed}
        made[str(seed)] = write_lora(folder / f"lora-{seed}", base, **named)
    return made


@pytest.fixture
def hub(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[HubServer]:
    """A hub with a base and an adapter for it; the user is in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    with open_user_hub(monkeypatch, tmp_path, token="hf_secret") as server:
        server.repositories[BASE] = HubRepository.from_folder(folders["base"])
        server.repositories[NAME] = HubRepository.from_folder(folders["0"])
        yield server


def publish_later(hub: HubServer, folders: dict[str, Path]) -> None:
    hub.repositories[NAME] = HubRepository.from_folder(folders["1"], commit=LATER_COMMIT)


def test_an_adapter_is_built_from_the_hub_and_says_where_it_came_from(
    expertctl: CommandRunner, hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    expertctl("pull", BASE)
    built = expertctl("build", NAME, "--json").document
    assert built["ref"] == f"{PACKAGE}@0.1.0"
    expertctl("unpack", built["path"], "there")
    manifest = json.loads((tmp_path / "there" / "expert.json").read_text())
    assert manifest["base"]["name"] == BASE
    source = manifest["training"]["source"]
    assert (source["repository"], source["revision"]) == (NAME, COMMIT)
    assert source["hub"] == hub.endpoint.removeprefix("http://")
    assert source["files"] == {
        name: f"sha256:{hashlib.sha256((folders['0'] / name).read_bytes()).hexdigest()}"
        for name in (CONFIG, WEIGHTS)
    }
    packed = (tmp_path / "there" / WEIGHTS).read_bytes()
    assert packed == (folders["0"] / WEIGHTS).read_bytes()
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        *("expert.json", CONFIG, WEIGHTS, "README.md")
    }


def test_only_the_files_of_an_adapter_are_downloaded(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    files = hub.repositories[NAME].files
    files |= {"optimizer.pt": b"x" * 9000, "checkpoint-5/adapter_config.json": b"{}"}
    expertctl("pull", BASE)
    hub.requests.clear()
    expertctl("build", NAME)
    assert {r.name for r in hub.requests if r.sent} == {CONFIG, WEIGHTS, "README.md"}
    hub.requests.clear()
    expertctl("build", f"{NAME}@{COMMIT}", "-o", "again.expert")
    assert hub.requests == []


def test_an_adapter_is_installed_and_runs(expertctl: CommandRunner, hub: HubServer) -> None:
    expertctl("pull", BASE)
    said = expertctl("install", f"hf:{NAME}", "--json")
    assert f"{PACKAGE}@0.1.0 was converted from {NAME} at {COMMIT[:12]}" in said.err
    assert "nobody else vouches for it" in said.err
    (installed,) = said.document["installed"]
    assert (installed["ref"], installed["outcome"]) == (f"{PACKAGE}@0.1.0", "installed")
    assert expertctl("verify", f"{PACKAGE}@0.1.0", "--json").document["verified"]
    keys = expertctl("keys", "list", "--json").document["keys"]
    assert [(key["name"], key["namespaces"]) for key in keys] == [("hf", ["hf", "local"])]
    ran = expertctl("run", "abc", "--expert", PACKAGE, "--greedy", "-n", "2", "--json").document
    assert [expert["ref"] for expert in ran["plan"]["experts"]] == [f"{PACKAGE}@0.1.0"]
    for words in (["list"], ["info", PACKAGE], ["outdated"], ["why", PACKAGE]):
        expertctl(*words)
    expertctl("remove", PACKAGE)


def test_a_commit_is_installed_once_and_the_next_is_a_new_version(
    expertctl: CommandRunner, hub: HubServer, folders: dict[str, Path]
) -> None:
    expertctl("pull", BASE)
    expertctl("install", f"hf:{NAME}")
    again = expertctl("install", f"hf:{NAME}", "--json")
    assert again.document["installed"] == []
    assert f"{PACKAGE}@0.1.0 is installed from {NAME} at {COMMIT[:12]} already" in again.err
    publish_later(hub, folders)
    later = expertctl("install", f"hf:{NAME}", "--json").document
    assert [item["ref"] for item in later["installed"]] == [f"{PACKAGE}@0.2.0"]
    assert expertctl("install", f"hf:{NAME}@{COMMIT}", "--json").document["installed"] == []


def test_it_is_installed_together_with_what_is_named_beside_it(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    expertctl("pull", BASE)
    expertctl("keys", "new", "me")
    expertctl("build", NAME, "--name", "local/mine", "--sign", "me", "-o", "mine.expert")
    done = expertctl("install", f"hf:{NAME}", "mine.expert", "--json").document
    assert {item["ref"] for item in done["installed"]} == {
        f"{PACKAGE}@0.1.0",
        "local/mine@0.1.0",
    }


def test_two_repositories_with_one_package_name_are_told_apart(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    hub.repositories["acme/ai.my.lora"] = hub.repositories[NAME]
    expertctl("pull", BASE)
    expertctl("install", f"hf:{NAME}")
    said = expertctl("install", "hf:acme/ai.my.lora", "--json", exit_code=4).document["error"]
    assert f"is installed from {NAME}" in said["message"]
    assert "`expertctl build acme/ai.my.lora --name local/NAME`" in said["hint"]


def test_two_names_of_one_package_are_refused_before_a_download(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    for other in ("acme-ai/my.lora", f"{NAME}@{COMMIT}"):
        said = expertctl("install", f"hf:{NAME}", f"hf:{other}", "--json", exit_code=4)
        assert said.document["error"]["message"] == f"{NAME} and {other} would both be {PACKAGE}"
    assert hub.requests == []


def test_a_package_of_another_origin_is_not_replaced(
    expertctl: CommandRunner, hub: HubServer, folders: dict[str, Path]
) -> None:
    expertctl("pull", BASE)
    expertctl("keys", "new", "me", "--namespace", "hf")
    expertctl("build", folders["1"], "--name", PACKAGE, "--sign", "me", "-o", "mine.expert")
    expertctl("install", "mine.expert")
    said = expertctl("install", f"hf:{NAME}", "--json", exit_code=4).document["error"]
    assert said["message"] == f"{PACKAGE}@0.1.0 is installed from a file"


def test_what_others_wrote_is_not_taken_for_the_users_own(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    """The router guards against copied examples, though a key of here signed the package."""
    expertctl("pull", BASE)
    prompts = ["Sort 3, 1, 2", "Sort 9, 5, 7", "Put 8, 2 in order"]
    draft = {"routing": {"task": "default", "examples": prompts}}
    hub.repositories[NAME].files["expert.json"] = json.dumps(draft).encode()
    expertctl("keys", "new", "me")
    written = Path("own")
    shutil.copytree(Path(expertctl("pull", BASE, "--json").document["path"]).parent, written)
    expertctl("build", NAME, "--name", "local/mine", "--sign", "me", "-o", "mine.expert")
    expertctl("install", "mine.expert")
    said = expertctl("install", f"hf:{NAME}")
    assert "examples" in said.err
    assert "local/mine" in said.err


def test_nothing_is_sent_offline_and_the_cache_answers(
    expertctl: CommandRunner, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("pull", BASE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = expertctl("build", NAME, "--json", exit_code=6).document["error"]
    assert "HF_HUB_OFFLINE" in refused["message"] + refused["hint"]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    expertctl("build", NAME)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expertctl("install", f"hf:{NAME}")
    assert hub.requests == []


def test_a_hub_that_is_down_is_replaced_by_the_cache(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    expertctl("pull", BASE)
    expertctl("build", NAME)
    hub.faults.answers["list"] = StatusFault(503)
    said = expertctl("build", NAME, "-o", "again.expert")
    assert "what the cache has of" in said.err


def make_pickle(folder: Path) -> bytes:
    stream = io.BytesIO()
    from safetensors.torch import load_file

    torch.save(load_file(folder / WEIGHTS), stream)
    return stream.getvalue()


def test_a_pickle_is_read_only_where_the_user_asks_for_it(
    expertctl: CommandRunner, hub: HubServer, folders: dict[str, Path]
) -> None:
    files = hub.repositories[NAME].files
    del files[WEIGHTS]
    files["adapter_model.bin"] = make_pickle(folders["0"])
    expertctl("pull", BASE)
    for words in (["build", NAME], ["install", f"hf:{NAME}"]):
        error = expertctl(*words, "--json", exit_code=4).document["error"]
        assert "a pickle, which can run code" in error["message"]
        assert f"`expertctl build {NAME} --allow-pickle-in-sandbox`" in error["hint"]
    assert hub.count_sent("adapter_model.bin") == 0
    built = expertctl("build", NAME, "--allow-pickle-in-sandbox", "--json").document
    assert built["ref"] == f"{PACKAGE}@0.1.0"


@pytest.mark.parametrize(
    ("change", "code", "words", "hint"),
    [
        ({CONFIG: None}, 4, "has no adapter_config.json", f"`expertctl pull {NAME}`"),
        ({WEIGHTS: None}, 4, "no weights in safetensors", WEIGHTS),
        ({CONFIG: None, f"sql/{CONFIG}": b"{}"}, 4, "in folders: sql", "`expertctl build DIR`"),
        ({CONFIG: b"[1]"}, 8, "adapter_config.json", ""),
        ({CONFIG: b'{"peft_type": "LORA"'}, 8, "adapter_config.json", ""),
        ({WEIGHTS: b"\xff" * 5000}, 8, WEIGHTS, ""),
    ],
)
def test_what_makes_no_adapter_is_refused(
    change: dict[str, bytes | None],
    code: int,
    words: str,
    hint: str,
    expertctl: CommandRunner,
    hub: HubServer,
) -> None:
    files = hub.repositories[NAME].files
    for name, data in change.items():
        if data is None:
            del files[name]
        else:
            files[name] = data
    expertctl("pull", BASE)
    for command in ("build", "install"):
        target = NAME if command == "build" else f"hf:{NAME}"
        error = expertctl(command, target, "--json", exit_code=code).document["error"]
        assert words in error["message"]
        assert hint in error["hint"]
    assert expertctl("list", "--json").document["experts"] == []


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (StatusFault(404), 3, f"has no model {NAME}"),
        (StatusFault(403, {"X-Error-Code": "GatedRepo"}), 6, "is gated"),
        (StatusFault(429), 6, "too many requests"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(
    fault: StatusFault, code: int, words: str, expertctl: CommandRunner, hub: HubServer
) -> None:
    hub.faults.answers["list"] = fault
    for command in (["build", NAME], ["install", f"hf:{NAME}"]):
        error = expertctl(*command, "--json", exit_code=code).document["error"]
        assert words in error["message"]


def test_a_file_that_was_changed_in_the_cache_is_refused(
    expertctl: CommandRunner, hub: HubServer, tmp_path: Path
) -> None:
    expertctl("pull", BASE)
    expertctl("build", NAME)
    path = next((tmp_path / "hf" / "hub").glob(f"models--*my_LoRA/snapshots/*/{WEIGHTS}"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.resolve().write_bytes(data)
    error = expertctl("install", f"hf:{NAME}", "--json", exit_code=5).document["error"]
    assert "is not the file that the hub listed" in error["message"]


def test_a_base_that_is_not_here_is_named_with_its_command(
    expertctl: CommandRunner, hub: HubServer
) -> None:
    error = expertctl("install", f"hf:{NAME}", "--json", exit_code=8).document["error"]
    assert f"base {BASE} is not known here" in error["message"]
    assert f"`expertctl pull {BASE}`" in error["message"]
    assert "snapshots" not in error["message"]
    assert expertctl("list", "--json").document["experts"] == []


def test_a_directory_comes_before_a_name(
    expertctl: CommandRunner, hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    expertctl("pull", BASE)
    shutil.copytree(folders["1"], tmp_path / NAME)
    hub.requests.clear()
    assert expertctl("build", NAME, "--json").document["ref"] == "local/my-lora@0.1.0"
    for path in (f"./{NAME}x", f"{NAME}x/"):
        expertctl("build", path, exit_code=3)
    assert hub.requests == []


def test_names_of_a_hub_are_no_part_of_a_project(expertctl: CommandRunner, hub: HubServer) -> None:
    Path("experts.toml").write_text("[experts]\n")
    for option in ("--save", "--locked"):
        expertctl("install", f"hf:{NAME}", option, exit_code=2)
    assert hub.requests == []
