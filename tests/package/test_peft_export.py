"""Directories for PEFT: stock PEFT reads them as it reads the ones the adapters came from."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from expertctl.errors import DigestError, UsageError
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build_package, plan_build
from expertctl.package.directory import export_peft_directories
from expertctl.package.draft import ManifestOverrides
from expertctl.package.write import spool_package
from expertctl.schema.manifest import AdapterKind
from tests.factories import make_package, write_dora, write_ia3, write_lora, write_soft_prompt

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = torch.tensor([[3, 60, 0, 17, 17, 42, 8, 25]])
WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "lora": write_lora,
    "rslora": lambda d, b: write_lora(d, b, use_rslora=True, rank=8, alpha=5),
    "patterns": lambda d, b: write_lora(
        d, b, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}
    ),
    "bfloat16": lambda d, b: write_lora(d, b, dtype="bfloat16"),
    "dora": write_dora,
    "ia3": write_ia3,
    "prompt tuning": write_soft_prompt,
    "p-tuning": lambda d, b: write_soft_prompt(d, b, kind="P_TUNING"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Leave the other cores to other tests."""
    torch.set_num_threads(1)


def logits(base_dir: Path, adapter: Path) -> Any:
    """What stock PEFT makes of a directory, on a base loaded afresh."""
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(base_dir)
    model = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.inference_mode():
        return model(IDS, use_cache=False).logits


def exported(package: Path, directory: Path) -> list[str]:
    with spool_package(package, target=directory) as (contents, spool):
        return export_peft_directories(directory, contents.layout, spool.blob)


@pytest.mark.parametrize("kind", WRITERS)
def test_peft_computes_the_same_from_the_export(
    kind: str, tmp_path: Path, base_dir: Path, facts: BaseFacts
) -> None:
    original = WRITERS[kind](tmp_path / "original", base_dir)
    plan = plan_build(original, ManifestOverrides(name="acme/x"), base=facts)
    package = build_package(plan, tmp_path / "x.expert").path
    assert exported(package, tmp_path / "out") == ["."]
    expected = logits(base_dir, original)
    assert torch.equal(logits(base_dir, tmp_path / "out"), expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(base_dir)
    with torch.inference_mode():
        assert not torch.equal(model(IDS, use_cache=False).logits, expected[:, -IDS.shape[1] :])


def test_the_bytes_are_those_of_the_publisher(
    tmp_path: Path, base_dir: Path, facts: BaseFacts
) -> None:
    package = make_package(tmp_path, base_dir=base_dir, base=facts)
    original = tmp_path / "acme-sql-1.0.0.files"
    exported(package, tmp_path / "out")
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (original / name).read_bytes()


def test_of_several_adapters_each_gets_a_directory_in_order(
    tmp_path: Path, base_dir: Path, facts: BaseFacts
) -> None:
    kinds: tuple[AdapterKind, ...] = ("soft_prompt", "lora", "ia3")
    package = make_package(
        tmp_path, base_dir=base_dir, base=facts, adapters=[(kind, {}) for kind in kinds]
    )
    places = exported(package, tmp_path / "out")
    assert places == ["1-soft_prompt", "2-lora", "3-ia3"]
    for place, write in zip(places, (write_soft_prompt, write_lora, write_ia3), strict=True):
        original = write(tmp_path / place, base_dir)
        assert torch.equal(logits(base_dir, tmp_path / "out" / place), logits(base_dir, original))


def test_the_model_card_and_licences_go_along(
    tmp_path: Path, base_dir: Path, facts: BaseFacts
) -> None:
    files = tmp_path / "acme-sql-1.0.0.files"
    files.mkdir()
    (files / "LICENSE").write_text("MIT")
    package = make_package(tmp_path, base_dir=base_dir, base=facts)
    exported(package, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "MIT"


def test_what_is_there_is_not_touched(package: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        exported(package, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_bytes_that_changed_since_they_were_checked_leave_nothing(
    package: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        contents, spool = stack.enter_context(spool_package(package, target=tmp_path / "out"))
        largest = max(contents.files, key=lambda file: file.size)
        blob = spool.folder / largest.digest.hex
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        with pytest.raises(DigestError):
            export_peft_directories(tmp_path / "out", contents.layout, spool.blob)
    assert list(tmp_path.iterdir()) == []
