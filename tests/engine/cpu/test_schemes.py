"""Which matrices of a base in GGUF stay in their blocks."""

import pytest

from expertctl.engine.cpu.schemes import choose_block_schemes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, parse_model_config

INPUTS = ("self_attn.q_proj", "mlp.gate_proj")


def config(*, tied: bool = False, **more: object) -> ModelConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 544, "vocab_size": 99, "head_dim": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return parse_model_config({"model_type": "qwen3", "tie_word_embeddings": tied, **sizes, **more})


def storages(model: ModelConfig, kind: str, **others: str) -> dict[str, str]:
    """Every matrix in one kind, but for modules whose name ends with one of the others."""
    names = [name for name, shape in model.tensor_shapes().items() if len(shape) == 2]
    ends = {name: [k for e, k in others.items() if e in name] for name in names}
    return {name: (ends[name] or [kind])[0] for name in names}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_all_matrices_of_one_kind_stay_in_it(kind: str) -> None:
    model = config()
    found = choose_block_schemes(model, storages(model, kind))
    assert set(found.schemes.values()) == {Scheme[kind]}
    assert found.warnings == ()
    assert {"lm_head.weight", "model.embed_tokens.weight"} < found.schemes.keys()
    assert {f"model.layers.1.{name}.weight" for name in INPUTS} < found.schemes.keys()


def test_each_matrix_stays_in_its_kind_or_is_held_in_int8_and_it_is_said() -> None:
    model = config(tied=True)
    kinds = storages(model, "Q4_0", v_proj="Q6_K", embed="Q6_K", up_proj="F16")
    found = choose_block_schemes(model, kinds)
    expected = {
        Scheme.Q6_K: ["embed", "v_proj"],
        Scheme.INT8: ["up_proj"],
        Scheme.Q4_0: ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
    }
    for scheme, names in expected.items():
        for name in names:
            assert {s for n, s in found.schemes.items() if name in n} == {scheme}
    assert "lm_head.weight" not in found.schemes
    assert found.warnings == ("some base weights, stored in blocks of F16, are held in int8",)


def test_rows_that_do_not_fill_super_blocks_are_held_in_int8() -> None:
    model = config()
    found = choose_block_schemes(model, storages(model, "Q4_K"))
    assert found.schemes["model.layers.0.mlp.down_proj.weight"] is Scheme.INT8
    assert found.schemes["model.layers.0.mlp.gate_proj.weight"] is Scheme.Q4_K


def test_a_base_without_such_blocks_is_refused() -> None:
    model = config()
    with pytest.raises(IncompatibleError, match="no blocks of a GGUF file") as caught:
        choose_block_schemes(model, storages(model, "BF16"))
    assert "Q4_K" in caught.value.hint


def test_routed_experts_are_refused() -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    model = config(**sizes, model_type="qwen3_moe")
    with pytest.raises(IncompatibleError, match="routed experts"):
        choose_block_schemes(model, storages(model, "Q8_0"))
