"""Which tensors a file must have: the one of a soft prompt, one type for all, something at all."""

from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import SoftPrompt, parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.tensor_file import read_table
from tests.factories import write_dora, write_ia3, write_lora, write_soft_prompt
from tests.package.forged_packages import (
    Shapes,
    catch_spec_error,
    parse_adapter_spec,
    parse_tensor_table,
)
from tests.tensor_shapes import prompt_config

BASE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
RIGHT: Shapes = {"prompt_embeddings": [5, 32]}


def written(kind: str = "PROMPT_TUNING", **changes: Any) -> dict[str, Any]:
    return prompt_config(Path("base"), BASE, kind=kind, tokens=5, **changes)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
@pytest.mark.parametrize("width", [32, None])
def test_a_soft_prompt_is_one_tensor(kind: str, width: int | None) -> None:
    spec = parse_adapter_spec(written(kind, token_dim=width), RIGHT)
    assert spec.parts == (SoftPrompt("prompt_embeddings", 5, 32),)
    assert (spec.kind, spec.rank, spec.tokens, spec.tensors) == ("soft_prompt", None, 5, 1)


@pytest.mark.parametrize(
    "shape", [[4, 32], [6, 32], [10, 32], [5, 64], [32, 5], [160], [1, 5, 32], [5, 32, 1], []]
)
def test_tokens_times_width_that_do_not_match_are_refused(shape: list[int]) -> None:
    message = catch_spec_error(written(), {"prompt_embeddings": shape})
    assert f"prompt_embeddings: {shape}, the configuration says [5, 32]" in message


@pytest.mark.parametrize("shape", [[], [160], [4, 32], [5, 32, 1]])
def test_the_tensor_is_a_matrix_also_where_its_width_is_not_stated(shape: list[int]) -> None:
    document = written(token_dim=None)
    assert "prompt_embeddings" in catch_spec_error(document, {"prompt_embeddings": shape})


@pytest.mark.parametrize(
    "name",
    [
        "prompt_embeddings.weight",
        "prompt_encoder.default.embedding.weight",
        "prefix_task_cols",
        "base_model.model.prompt_embeddings",
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_that_means_nothing_is_refused_by_name(name: str) -> None:
    assert name in catch_spec_error(written(), {**RIGHT, name: [5, 32]})
    alone = catch_spec_error(written(), {name: [5, 32]})
    assert name in alone
    assert "prompt_embeddings is missing" in alone


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_other_types_are_refused(dtype: str) -> None:
    assert f"tensors are {dtype}" in catch_spec_error(written(), RIGHT, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("write", [write_lora, write_dora, write_ia3, write_soft_prompt])
def test_every_kind_is_read_in_every_type(
    write: Any, dtype: str, base_dir: Path, tmp_path: Path
) -> None:
    files = write(tmp_path / "x", base_dir, dtype=dtype)
    config = parse_adapter_config((files / "adapter_config.json").read_bytes(), what="c")
    spec = build_adapter_spec(config, read_table(files / "adapter_model.safetensors"), what="w")
    assert (spec.dtype, spec.kind) == (dtype, config.kind)
    assert spec.parts


def test_tensors_of_one_kind_are_refused_under_the_configuration_of_another(
    base_dir: Path, tmp_path: Path
) -> None:
    writers = (write_lora, write_dora, write_ia3, write_soft_prompt)
    files = [w(tmp_path / w.__name__, base_dir) for w in writers]
    for one in files:
        config = parse_adapter_config((one / "adapter_config.json").read_bytes(), what="c")
        for other in files:
            tensors = read_table(other / "adapter_model.safetensors")
            if one is not other:
                with pytest.raises(InvalidPackageError):
                    build_adapter_spec(config, tensors, what="w")


def test_no_tensor_at_all_is_refused() -> None:
    with pytest.raises(InvalidPackageError, match="there is no tensor"):
        parse_tensor_table({})
