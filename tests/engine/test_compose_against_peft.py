"""Whole models with experts: all decoders and compiled plans against transformers and PEFT."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from expertctl.engine.adapters.compile import WeightedAdapter, fold_plan
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import DoraTensors
from expertctl.engine.adapters.steps import compute_dora_scales as dora_gains
from expertctl.engine.arrays import FloatArray
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.packed_base import PackedBase
from expertctl.engine.kernels.packed_format import PlanPacking, Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array, to_tensor
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import (
    CLASSES,
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
    stack_logits,
)
from tests.engine.package_fixtures import load_adapters
from tests.engine.packing import pack_base
from tests.engine.random_experts import make_plan_form, make_random_expert, make_torch_plan
from tests.factories import (
    write_dora,
    write_ia3,
    write_lora,
    write_soft_prompt,
)
from tests.tensor_shapes import ALL_PROJECTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
SIZES = {"head_dim": 16}
"""What kernels take too."""
LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1, alpha 1": {"rank": 1, "alpha": 1},
    "rslora": {"use_rslora": True, "rank": 8, "alpha": 5},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 3, "mlp.up_proj": 1.5}},
    "both patterns and rslora": {
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"o_proj": 7, "gate_proj": 2},
    },
    "layers_to_transform": {"layers_to_transform": [0, 2]},
    "attention only": {"targets": ("q_proj", "v_proj")},
    "bfloat16": {"dtype": "bfloat16", "rank": 3},
    "float16": {"dtype": "float16", "rank": 3},
}
IA3S: dict[str, dict[str, Any]] = {
    "PEFT's own choice": {},
    "attention only": {"targets": ("q_proj", "v_proj", "o_proj"), "feedforward": ()},
    "feed-forward only": {
        "targets": ("up_proj", "down_proj"),
        "feedforward": ("up_proj", "down_proj"),
    },
    "every layer": {"targets": ALL_PROJECTIONS, "feedforward": ("down_proj", "q_proj")},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in CLASSES},
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen3 with biases, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2, no groups": ("qwen2", {"num_key_value_heads": 4}),
}
"""Bases: qwen2 has biases of its own, all have two heads for a group of four."""


def choose_pairs(variants: Iterable[str], *, steps: tuple[int, ...]) -> pytest.MarkDecorator:
    """Parametrise: each variant on as many bases as there are steps, and each base with several.

    What a configuration says is read without the base, so not every pair is another case.
    """
    bases = list(SHAPES)
    pairs = [
        (bases[(number + step) % len(bases)], variant)
        for number, variant in enumerate(variants)
        for step in steps
    ]
    assert {base for base, _ in pairs} == set(SHAPES)
    return pytest.mark.parametrize(("base", "variant"), pairs)


Ours = Callable[..., torch.Tensor]
"""Scores after the prompt and after each decoded token, of a model with weighted directories.

Those of torch stand before those of kernels and of static steps, [3, tokens, vocab].
"""


@dataclass(frozen=True)
class Bases:
    """Random models and the decoders of them, made once for all tests; plans change neither."""

    place: Path
    crew: ThreadPool
    oracles: dict[str, ReferenceModel] = field(default_factory=dict)
    by_torch: dict[Path, Decoder] = field(default_factory=dict)
    by_kernels: dict[Path, tuple[PackedBase, PackedDecoder]] = field(default_factory=dict)
    by_steps: dict[Path, CudaGraphDecoder] = field(default_factory=dict)

    def oracle(self, arch: str, **config: Any) -> ReferenceModel:
        """A copy of the model, for PEFT changes what it wraps."""
        key = f"{arch} {sorted(config.items())}"
        if key not in self.oracles:
            directory = self.place / str(len(self.oracles))
            self.oracles[key] = build_reference_model(directory, arch, **config)
        made = self.oracles[key]
        return ReferenceModel(made.directory, deepcopy(made.model))

    def decoder(self, oracle: ReferenceModel) -> Decoder:
        if oracle.directory not in self.by_torch:
            self.by_torch[oracle.directory] = oracle.load_decoder()
        return self.by_torch[oracle.directory]

    def packed(self, oracle: ReferenceModel) -> tuple[PackedBase, PackedDecoder]:
        directory = oracle.directory
        if directory not in self.by_kernels:
            config = read_model_config(directory)
            base = pack_base(config, load_base_weights(directory, config), Scheme.FLOAT32)
            self.by_kernels[directory] = (base, PackedDecoder(base, self.crew, chunk=5))
        return self.by_kernels[directory]

    def static(self, oracle: ReferenceModel) -> CudaGraphDecoder:
        directory = oracle.directory
        if directory not in self.by_steps:
            config = read_model_config(directory)
            weights = load_base_weights(directory, config)
            self.by_steps[directory] = CudaGraphDecoder(config, weights, min_capacity=8)
        return self.by_steps[directory]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    crew = ThreadPool(1)
    yield Bases(tmp_path_factory.mktemp("bases"), crew)
    crew.close()


@pytest.fixture
def oracle(bases: Bases) -> MakeReferenceModel:
    return bases.oracle


@pytest.fixture
def ours(bases: Bases) -> Ours:
    def each(oracle: ReferenceModel, *experts: tuple[Path, float]) -> torch.Tensor:
        rows = by_torch(bases.decoder(oracle), *experts)
        packed = by_kernels(*bases.packed(oracle), *experts)
        return torch.stack((rows, packed, by_steps(bases.static(oracle), *experts)))

    return each


def assert_all_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    for rows in ours:
        assert_same_logits(rows, theirs)


def by_torch(decoder: Decoder, *experts: tuple[Path, float]) -> torch.Tensor:
    chain = [
        weighted(lambda module: to_array(decoder.matrix(module)), load_adapters(path), weight)
        for path, weight in experts
    ]
    plan = make_torch_plan(decoder.config, chain)
    cache = KVCache(decoder.config, len(IDS) + 20)
    deltas, soft = plan.torch_deltas, plan.soft_prompt
    first = decoder.prefill(IDS[:7], cache, deltas, soft_prompt=soft, chunk=5)
    rows = [first.logits, *(decoder.decode(i, cache, deltas).logits for i in IDS[7:])]
    return stack_logits(rows)


def by_kernels(
    base: PackedBase, decoder: PackedDecoder, *experts: tuple[Path, float]
) -> torch.Tensor:
    config = base.config
    chain = [weighted(base.unpack_weights, load_adapters(path), weight) for path, weight in experts]
    plan = fold_plan(chain, make_plan_form(config, PlanPacking(Scheme.FLOAT32))).compile()
    cache = PagedKVCache(config, len(IDS) + 20)
    first = decoder.prefill(IDS[:7], cache, plan.packed, soft_prompt=plan.soft_prompt)
    rows = [first.logits, *(decoder.decode(i, cache, plan.packed).logits for i in IDS[7:])]
    return stack_logits(rows)


def by_steps(decoder: CudaGraphDecoder, *experts: tuple[Path, float]) -> torch.Tensor:
    """Decode the text in the last of three rows, the first being another one with another plan."""
    config = decoder.config
    chain = [
        weighted(lambda module: to_array(decoder.matrix(module)), load_adapters(path), weight)
        for path, weight in experts
    ]
    plan, other = make_torch_plan(config, chain), [make_random_expert(config, "ia3")]
    arena = StaticKVCache(
        config, rows=3, capacity=len(IDS) + 20, dtype=torch.float32, device=decoder.device
    )
    neighbour, cache = arena.get_row(0), arena.get_row(2)
    neighbours = make_torch_plan(config, [*other, make_random_expert(config, seed=1)]).torch_deltas
    decoder.prefill(IDS[3:9], neighbour, neighbours)
    deltas, soft = plan.torch_deltas, plan.soft_prompt
    first = decoder.prefill(IDS[:7], cache, deltas, soft_prompt=soft, chunk=5)
    rows = [first.logits]
    for token in IDS[7:]:
        batch = [GraphStepRow(5, neighbour, neighbours), GraphStepRow(token, cache, deltas)]
        rows.append(decoder.step(batch)[1])
    decoder.free_buffers()
    return stack_logits(rows)


def weighted(
    matrix: Callable[[str], FloatArray], adapter: LoadedAdapter, weight: float
) -> WeightedAdapter:
    gains = {
        module: tuple(
            dora_gains(matrix(module), step, what=module)
            for step in steps
            if isinstance(step, DoraTensors)
        )
        for module, steps in adapter.modules.items()
    }
    return WeightedAdapter(adapter, weight, gains)


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0, 6 - len(IDS) :]
    return logits


def adapted(model: ReferenceModel, directory: Path) -> Any:
    return peft.PeftModel.from_pretrained(model.model, str(directory)).eval()


def assert_equals_peft(ours: Ours, model: ReferenceModel, directory: Path) -> None:
    base = theirs(model.model)
    expected = theirs(adapted(model, directory))
    assert float((expected - base).abs().max()) > 0.01, "the expert must change something"
    assert_all_same(ours(model, (directory, 1.0)), expected)


@choose_pairs(LORAS, steps=(0, 3))
def test_one_lora_equals_peft(
    ours: Ours, base: str, variant: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    assert_equals_peft(ours, model, write_lora(tmp_path / "x", model.directory, **LORAS[variant]))


@choose_pairs(LORAS, steps=(1, 5))
def test_one_dora_equals_peft(
    ours: Ours, base: str, variant: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    assert_equals_peft(ours, model, write_dora(tmp_path / "x", model.directory, **LORAS[variant]))


@choose_pairs(IA3S, steps=(0, 2, 5))
def test_one_ia3_equals_peft(
    ours: Ours, base: str, variant: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    ia3 = write_ia3(tmp_path / "x", model.directory, scale=0.1, **IA3S[variant])
    assert_equals_peft(ours, model, ia3)


PROMPTS: dict[str, Callable[[int], Any]] = {
    "prompt tuning": lambda n: peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=n),
    "P-tuning, MLP": lambda n: peft.PromptEncoderConfig(
        "CAUSAL_LM", num_virtual_tokens=n, encoder_hidden_size=16
    ),
    "P-tuning, LSTM": lambda n: peft.PromptEncoderConfig(
        "CAUSAL_LM",
        num_virtual_tokens=n,
        encoder_reparameterization_type="LSTM",
        encoder_hidden_size=16,
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("base", SHAPES)
def test_a_soft_prompt_saved_by_peft_itself_equals_it(
    ours: Ours, base: str, kind: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    plain = theirs(model.model)
    torch.manual_seed(3)
    config_of = PROMPTS[kind]
    prompted: Any = peft.get_peft_model(model.model, config_of(6))
    prompted.eval()
    prompted.save_pretrained(str(tmp_path / "prompt"))
    expected = theirs(prompted)
    assert float((expected - plain).abs().max()) > 0.01, "the prompt must change something"
    assert_all_same(ours(model, (tmp_path / "prompt", 1.0)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_soft_prompt_of_any_dtype_equals_its_embeddings(
    ours: Ours, dtype: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("qwen3", **SIZES)
    one = write_soft_prompt(tmp_path / "one", model.directory, tokens=3, dtype=dtype)
    two = write_soft_prompt(tmp_path / "two", model.directory, tokens=2, seed=1, kind="P_TUNING")
    for order in ((one, two), (two, one)):
        expected = embedded(model.model, *order)
        assert_all_same(ours(model, *((path, 1.0) for path in order)), expected)
    assert torch.equal(ours(model, (one, 1.0), (two, 0.0)), ours(model, (one, 1.0)))


def embedded(model: Any, *prompts: Path) -> torch.Tensor:
    """What transformers answers to the embeddings themselves."""
    rows = [to_tensor(load_adapters(path).soft_prompts[0]).float() for path in prompts]
    with torch.inference_mode():
        tokens = model.get_input_embeddings()(torch.tensor(IDS))
        together = torch.cat((*rows, tokens))[None]
        logits: torch.Tensor = model(inputs_embeds=together, use_cache=False).logits[0]
    return logits[6 - len(IDS) :]


@pytest.mark.parametrize("write", [write_lora, write_dora, write_ia3])
def test_a_soft_prompt_beside_another_kind_equals_the_embeddings_into_peft(
    ours: Ours, write: Callable[..., Path], oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    """PEFT refuses the two together, so its adapted model is given the embeddings."""
    model = oracle("qwen2", **SIZES)
    other = write(tmp_path / "other", model.directory)
    prompt = write_soft_prompt(tmp_path / "prompt", model.directory)
    expected = embedded(adapted(model, other).base_model.model, prompt)
    assert_all_same(ours(model, (prompt, 1.0), (other, 1.0)), expected)
    assert_all_same(ours(model, (other, 1.0), (prompt, 1.0)), expected)


def active_together(model: ReferenceModel, *directories: Path) -> torch.Tensor:
    """What PEFT answers with several adapters of one type at once."""
    names = [str(n) for n in range(len(directories))]
    wrapped: Any = peft.PeftModel.from_pretrained(
        model.model, str(directories[0]), adapter_name=names[0]
    )
    for name, directory in zip(names[1:], directories[1:], strict=True):
        wrapped.load_adapter(str(directory), adapter_name=name)
    wrapped.base_model.set_adapter(names)
    return theirs(wrapped.eval())


@pytest.mark.parametrize("base", SHAPES)
def test_loras_that_peft_runs_together_equal_it(
    ours: Ours, base: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    some = [
        write_lora(tmp_path / str(n), model.directory, seed=n, rank=n + 1, alpha=3)
        for n in range(3)
    ]
    expected = active_together(model, *some)
    assert_all_same(ours(model, *((path, 1.0) for path in some)), expected)


@pytest.mark.parametrize("base", SHAPES)
def test_ia3s_that_peft_runs_together_equal_it(
    ours: Ours, base: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    some = [write_ia3(tmp_path / str(n), model.directory, scale=0.1, seed=n) for n in range(3)]
    expected = active_together(model, *some)
    assert_all_same(ours(model, *((path, 1.0) for path in some)), expected)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("base", SHAPES)
def test_loras_and_doras_that_peft_runs_together_equal_it(
    ours: Ours, base: str, step: int, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    """A DoRA scales all that stands before it but the bias, so their order counts."""
    arch, config = SHAPES[base]
    model = oracle(arch, **{**SIZES, **config})
    writers = (write_lora, write_dora, write_dora)
    some = [write(tmp_path / str(n), model.directory, seed=n) for n, write in enumerate(writers)]
    order = some[::step]
    expected = active_together(model, *order)
    assert_all_same(ours(model, *((path, 1.0) for path in order)), expected)


def test_fan_in_fan_out_changes_nothing_on_linear_layers(
    ours: Ours, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    """PEFT corrects the setting for ``torch.nn.Linear``; A and B lie the same way in both."""
    model = oracle("llama", **SIZES)
    lora = write_lora(tmp_path / "lora", model.directory, fan_in_fan_out=True)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        wrapped = adapted(model, lora)
    assert_all_same(ours(model, (lora, 1.0)), theirs(wrapped))


def test_texts_of_one_batch_equal_the_adapter_names_of_peft(
    oracle: MakeReferenceModel, bases: Bases, tmp_path: Path
) -> None:
    model = oracle("qwen2", **SIZES)
    paths = [
        write_lora(tmp_path / str(n), model.directory, seed=n, rank=3 * n + 1) for n in range(3)
    ]
    expected = by_adapter_names(model, paths, ["1", "__base__", "0", "2", "1"])
    _, decoder = bases.packed(model)
    config = decoder.config
    form = make_plan_form(config, PlanPacking(Scheme.FLOAT32))
    plans = [
        fold_plan([WeightedAdapter(load_adapters(path))], form).compile().packed for path in paths
    ]
    texts = [
        (PagedKVCache(config, 20), plan) for plan in (plans[1], None, plans[0], plans[2], plans[1])
    ]
    rows = [stack_logits([decoder.prefill(IDS[:7], *text).logits for text in texts])]
    rows += [decoder.step([DecodeRow(token, *text) for text in texts]) for token in IDS[7:]]
    for ours, theirs in zip(stack_logits(rows, dim=1), expected, strict=True):
        assert_same_logits(ours, theirs)


def by_adapter_names(model: ReferenceModel, paths: list[Path], names: list[str]) -> torch.Tensor:
    """What PEFT answers to texts of one batch that have an adapter each."""
    wrapped: Any = peft.PeftModel.from_pretrained(model.model, str(paths[0]), adapter_name="0")
    for number, path in enumerate(paths[1:], 1):
        wrapped.load_adapter(str(path), adapter_name=str(number))
    with torch.inference_mode():
        ids = torch.tensor([IDS] * len(names))
        logits: torch.Tensor = wrapped.eval()(ids, use_cache=False, adapter_names=names).logits
    return logits[:, 6 - len(IDS) :]


def test_weighted_loras_equal_the_concatenation_of_peft(
    ours: Ours, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("qwen3", **SIZES)
    one = write_lora(tmp_path / "one", model.directory, rank=4, alpha=6, seed=1)
    two = write_lora(
        tmp_path / "two", model.directory, rank=4, targets=("q_proj", "up_proj"), seed=2
    )
    wrapped = peft.PeftModel.from_pretrained(model.model, str(one), adapter_name="one")
    wrapped.load_adapter(str(two), adapter_name="two")
    wrapped.add_weighted_adapter(["one", "two"], [0.7, 1.5], "both", combination_type="cat")
    wrapped.set_adapter("both")
    expected = theirs(wrapped)
    assert_all_same(ours(model, (one, 0.7), (two, 1.5)), expected)
    assert_all_same(ours(model, (two, 1.5), (one, 0.7)), expected)


def test_weight_zero_is_the_base_bit_by_bit(
    ours: Ours, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("qwen2", **SIZES)
    lora = write_lora(tmp_path / "lora", model.directory)
    assert torch.equal(ours(model, (lora, 0.0)), ours(model))


def test_a_negative_weight_takes_back_what_the_expert_adds(
    ours: Ours, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("llama", **SIZES)
    lora = write_lora(tmp_path / "lora", model.directory)
    assert_all_same(ours(model, (lora, 1.0), (lora, -1.0)), theirs(model.model))


def test_the_base_is_not_changed_by_a_plan(oracle: MakeReferenceModel, tmp_path: Path) -> None:
    model = oracle("qwen3", tie_word_embeddings=True, **SIZES)
    lora = write_lora(tmp_path / "lora", model.directory)
    decoder = model.load_decoder()
    plan = make_torch_plan(decoder.config, [WeightedAdapter(load_adapters(lora))])

    def logits(deltas: Any) -> torch.Tensor:
        return torch.from_numpy(decoder.prefill(IDS, KVCache(decoder.config, 20), deltas).logits)

    before = logits({})
    assert not torch.equal(logits(plan.torch_deltas), before)
    assert torch.equal(logits({}), before)
