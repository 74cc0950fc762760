"""Quantised bases in every engine: as a base of the decoded numbers, and as PEFT with experts."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from expertctl.engine.adapters.compile import WeightedAdapter
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights, open_stored_weights
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import IncompatibleError
from expertctl.package.base_model import read_base_headers
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import build_reference_model, stack_logits
from tests.engine.family_models import SHAPES, build_family_model
from tests.engine.package_fixtures import load_adapters
from tests.engine.random_experts import make_torch_plan
from tests.engine.torch.stacked_models import compute_scores, load_stacked_decoder
from tests.factories import write_base, write_lora
from tests.quantised_bases import (
    BNB_CONFIG,
    MakeParts,
    QuantisedParts,
    edit_config,
    make_awq,
    make_gptq,
    make_nf4,
    quantise_base,
    store_mxfp4,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
TOLERANCE = 1e-4
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
METHODS: dict[str, tuple[dict[str, Any], MakeParts]] = {
    "NF4": (BNB_CONFIG, lambda weight: make_nf4(weight, double=True)),
    "GPTQ": (GPTQ, lambda weight: make_gptq(weight, shuffled=True, symmetric=False)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32}, make_awq),
}


def write_both(place: Path, method: str) -> tuple[Path, Path]:
    """Write a quantised base, and a plain one with the decoded numbers."""
    bases = [
        write_base(place / name, hidden=128, intermediate=192, head_dim=32, tie=False)
        for name in ("quantised", "plain")
    ]
    decoded = quantise_base(bases[0], *METHODS[method])
    save_file(decoded, bases[1] / "model.safetensors")
    return bases[0], bases[1]


@pytest.mark.parametrize("method", METHODS)
def test_every_engine_loads_the_decoded_numbers(method: str, tmp_path: Path) -> None:
    quantised, plain = write_both(tmp_path, method)
    config = read_model_config(quantised)
    assert config == read_model_config(plain)
    for dtype in ("float32", "bf16"):
        found, wanted = (
            load_plain_weights(base, config, dtype=dtype).tensors for base in (quantised, plain)
        )
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    tensors, others = (load_base_weights(base, config).tensors for base in (quantised, plain))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in others)
    for scheme in (Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4):
        ours, theirs = (load_packed_base(base, config, scheme) for base in (quantised, plain))
        for module in config.linear_shapes():
            assert np.array_equal(ours.unpack_weights(module), theirs.unpack_weights(module))


def test_only_numbers_that_bfloat16_does_not_represent_are_rounded_to_it(tmp_path: Path) -> None:
    for method, warnings in {
        "NF4": ("base weights stored as float32 are rounded to bfloat16",),
        "AWQ": (
            "base weights stored as AWQ int4 in groups of 32 are rounded to bfloat16",
            "base weights stored as float32 are rounded to bfloat16",
        ),
    }.items():
        base, _ = write_both(tmp_path / method, method)
        assert load_plain_weights(base, read_model_config(base), dtype="bf16").warnings == warnings


@pytest.mark.parametrize("method", METHODS)
def test_a_lora_on_a_quantised_base_has_the_logits_of_peft_on_its_numbers(
    method: str, tmp_path: Path
) -> None:
    model = build_reference_model(tmp_path / "base", "qwen3", **SIZES)
    decoded = quantise_base(model.directory, *METHODS[method])
    model.model.load_state_dict(decoded)
    lora = write_lora(tmp_path / "lora", model.directory)
    assert_same_as_peft(model.directory, model.model, lora)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_qlora_adapter_on_nf4_has_the_logits_of_peft_and_bitsandbytes(
    arch: str, double: bool, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def make(weight: Tensor) -> QuantisedParts:
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        parts = {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return QuantisedParts({".weight": codes, **parts}, weight)

    directory = build_reference_model(tmp_path / "base", arch, **SIZES).directory
    config = {**BNB_CONFIG, "bnb_4bit_use_double_quant": double}
    quantise_base(directory, config, make)
    edit_config(directory, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    layers = [layer for layer in theirs.modules() if type(layer).__name__ == "Linear4bit"]
    assert len(layers) == 14, "bitsandbytes must decode the weights"
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # which rounds activations to bfloat16
    lora = write_lora(tmp_path / "lora", directory)
    assert_same_as_peft(directory, theirs, lora)


def assert_same_as_peft(directory: Path, theirs: Any, lora: Path) -> None:
    before = read_logits(theirs)
    expected = read_logits(peft.PeftModel.from_pretrained(theirs, str(lora)).eval())
    assert float((expected - before).abs().max()) > 0.01, "the adapter must change something"
    config = read_model_config(directory)
    decoder = Decoder(config, load_base_weights(directory, config))
    plan = make_torch_plan(config, [WeightedAdapter(load_adapters(lora), 1.0, {})])
    cache = KVCache(config, len(IDS) + 4)
    first = decoder.prefill(IDS[:7], cache, plan.torch_deltas)
    rows = [first.logits, *(decoder.decode(i, cache, plan.torch_deltas).logits for i in IDS[7:])]
    difference = float((stack_logits(rows) - expected).abs().max())
    print(f"largest difference {difference:.3g} of logits up to {float(expected.abs().max()):.3g}")
    assert difference <= TOLERANCE


def read_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0, 6 - len(IDS) :]
    return logits.float()


@pytest.mark.parametrize("arch", ["gemma3_text", "olmo2"])
def test_a_family_that_only_renames_norms_is_read_quantised(arch: str, tmp_path: Path) -> None:
    """QLoRA is trained on such bases, too."""
    config = next(config for name, config in SHAPES if name == arch)
    model = build_family_model(tmp_path / "base", arch, **config)
    decoded = quantise_base(tmp_path / "base", BNB_CONFIG, make_nf4)
    model.load_state_dict({n: t.float() for n, t in decoded.items()}, strict=False)
    ids = [3, 60, 17, 42, 8, 25]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy()
    found = read_model_config(tmp_path / "base")
    decoder = PlainDecoder(found, load_plain_weights(tmp_path / "base", found))
    ours = decoder.prefill(ids, PagedKVCache(found, 16, layout=ROW_PAGES)).logits
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_a_family_with_several_projections_in_a_matrix_is_refused_quantised(tmp_path: Path) -> None:
    config = next(config for name, config in SHAPES if name == "phi3")
    build_family_model(tmp_path / "base", "phi3", **config)
    quantise_base(tmp_path / "base", BNB_CONFIG, make_nf4)
    with pytest.raises(IncompatibleError, match="quantised weights of phi3"):
        read_base_headers(tmp_path / "base")


def test_experts_in_mxfp4_run_as_transformers_runs_what_it_decodes(tmp_path: Path) -> None:
    """In memory, from the files, as tensors of torch, and in a stack with too few slots."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 8}
    build_family_model(tmp_path, "gpt_oss", num_experts_per_tok=2, sliding_window=5, **sizes)
    store_mxfp4(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS]), use_cache=False).logits[0]
    config = read_model_config(tmp_path)
    for weights in (load_plain_weights(tmp_path, config), open_stored_weights(tmp_path, config)):
        decoder, cache = PlainDecoder(config, weights), PagedKVCache(config, 20, layout=ROW_PAGES)
        hidden = decoder.read_hidden(IDS, cache)
        assert_close(torch.from_numpy(decoder.score(hidden)), theirs)
    [warning] = load_base_weights(tmp_path, config, dtype=torch.bfloat16).warnings
    assert warning == "base weights stored as float32 are rounded to bfloat16"  # those of attention
    for slots in (None, 2):
        with load_stacked_decoder(tmp_path, slots=slots) as (steps, _):
            assert_close(compute_scores(steps, IDS, prefill=5), theirs[4:])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Check to 1e-5 of the largest logit."""
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5
