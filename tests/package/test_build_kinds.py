"""BUILD for every kind of adapter: several in one package, and their numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import draft_manifest, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.read import read_package
from expertctl.package.tensor_file import read_table
from tests.factories import (
    Adapter,
    make_package,
    write_dora,
    write_ia3,
    write_safetensors,
    write_soft_prompt,
)


def refused(directory: Path, facts: BaseFacts) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        plan_build(directory, ManifestOverrides(), base=facts)
    return caught.value.message


EVERY_KIND: list[Adapter] = [
    ("soft_prompt", {"tokens": 3}),
    ("lora", {"targets": ("q_proj",), "rank": 2}),
    ("ia3", {}),
    ("dora", {"dtype": "bfloat16", "targets": ("q_proj", "up_proj")}),
    ("soft_prompt", {"tokens": 2, "kind": "P_TUNING", "seed": 1}),
]


def test_several_adapters_of_every_kind_are_one_package_in_the_order_given(
    base_dir: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    contents = read_package(
        make_package(tmp_path, base_dir=base_dir, base=facts, adapters=EVERY_KIND)
    )
    assert contents.manifest.kind == "soft_prompt+lora+ia3+dora"
    assert contents.manifest.virtual_tokens == 5
    sizes = [(a.kind, a.rank, a.tokens, a.dtype, a.tensors) for a in contents.manifest.adapters]
    assert sizes == [
        ("soft_prompt", None, 3, "float32", 1),
        ("lora", 2, None, "float32", 4),
        ("ia3", None, None, "float32", 6),
        ("dora", 4, None, "bfloat16", 12),
        ("soft_prompt", None, 2, "float32", 1),
    ]
    assert [spec.kind for spec in contents.adapters] == [kind for kind, _ in EVERY_KIND]
    assert contents.manifest.description == "soft prompt and LoRA and IA³ and DoRA adapter sql"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ia3"}, "says kind ia3, the files say soft_prompt"),
        ({"tokens": 4}, "says tokens 4, the files say 3"),
        ({"dtype": "float16"}, "says dtype float16, the files say float32"),
        ({"tensors": 2}, "says tensors 2, the files say 1"),
        ({"rank": 4}, "adapters/0/rank"),
        ({"config": "2-lora.json"}, "prompt_embeddings: it belongs to a soft prompt"),
        ({"config": "../1.json"}, "adapters/0/config"),
        ({"config": "gone.json"}, "gone.json is missing"),
    ],
)
def test_what_a_person_says_of_one_of_several_is_held_to_its_files(
    change: dict[str, Any], message: str, base_dir: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    make_package(tmp_path, base_dir=base_dir, base=facts, adapters=EVERY_KIND)
    directory = tmp_path / "acme-sql-1.0.0.files"
    document = json.loads((directory / "expert.json").read_text())
    document["adapters"][0] |= change
    if change.get("kind") == "ia3":
        document["adapters"][0]["tokens"] = None
    (directory / "expert.json").write_text(json.dumps(document))
    assert message in refused(directory, facts)


def test_a_draft_of_several_adapters_is_complete(
    base_dir: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    make_package(tmp_path, base_dir=base_dir, base=facts, adapters=EVERY_KIND[:2])
    document: Any = draft_manifest(
        tmp_path / "acme-sql-1.0.0.files", ManifestOverrides(), base=facts
    )
    assert document["adapters"] == [
        {
            "kind": "soft_prompt", "tokens": 3, "dtype": "float32", "tensors": 1,
            "path": "1-soft_prompt.safetensors", "config": "1-soft_prompt.json",
        },
        {
            "kind": "lora", "rank": 2, "dtype": "float32", "tensors": 4,
            "path": "2-lora.safetensors", "config": "2-lora.json",
        },
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "tensor", "place"),
    [
        (write_dora, "lora_magnitude_vector", "0.mlp.down_proj"),
        (write_ia3, "ia3_l", "0.mlp.down_proj"),
        (write_soft_prompt, "prompt_embeddings", "prompt_embeddings"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 5000.0])
def test_the_numbers_of_every_kind_are_looked_at(
    write: Callable[..., Path],
    tensor: str,
    place: str,
    value: float,
    base_dir: Path,
    facts: BaseFacts,
    tmp_path: Path,
) -> None:
    files = write(tmp_path / "x", base_dir)
    path = files / "adapter_model.safetensors"
    tensors = read_table(path).tensors
    arrays = {name: np.ones(info.shape, np.float32) for name, info in tensors.items()}
    name = next(name for name in arrays if place in name and name.endswith(tensor))
    arrays[name].reshape(-1)[-1] = value
    write_safetensors(path, arrays)
    if np.isfinite(value):
        (warning,) = plan_build(files, ManifestOverrides(), base=facts).warnings
        assert place in warning
        assert "numbers up to 5e+03; trained adapters stay below 1000" in warning
    else:
        assert f"{name} holds NaN or infinity" in refused(files, facts)
