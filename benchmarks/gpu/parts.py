"""The parts of the GPU check: each is one process, which writes the rows of its table.

Numerics are compared with plain formulas in float64, speed is that of `benchmarks.cuda`, routed
experts are those of `benchmarks.moe`. In a rehearsal a processor runs the same code on small bases,
and only numerics are checked.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from benchmarks.cuda import (
    EXPERTS,
    SHAPES,
    CudaWorkload,
    compile_plan,
    make_random_expert,
    make_random_weights,
    measure_workload,
)
from benchmarks.engine_process import EngineProcess, make_prompt_ids
from benchmarks.harness import Row, judge
from benchmarks.routed.on_device import (
    DeviceSetup,
    compare_on_device,
    make_opener,
    measure_turns,
)
from benchmarks.routed.traced_base import RoutedShape, make_trace, write_base
from expertctl import __version__
from expertctl.engine.arrays import AnyArray
from expertctl.engine.bench_subject import load_shape_config
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.devices import CUDA, get_device_name, is_cuda_available
from expertctl.engine.torch.functional import (
    NormWeights,
    TorchDeltas,
    apply_rope,
    compute_rope_table,
)
from expertctl.engine.torch.reference import reference_attention
from expertctl.engine.torch.transformer import AttentionWeights, Transformer
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import EMBEDDING_TENSOR, ModelConfig, parse_model_config
from expertctl.schema.strict_json import JsonObject

CPU = torch.device("cpu")
ROUNDS = 3
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest allowed error of logits, as a share of the largest exact one."""
PROMPT, STEPS = 40, 24
"""Tokens of a sequence whose logits are compared with float64."""


@dataclass(frozen=True, slots=True)
class CheckScale:
    """The device of the parts, and the amount of work."""

    device: torch.device
    routed: RoutedShape
    tokens: int
    """Tokens of the trace that determines the requests for routed experts."""
    rounds: int = ROUNDS

    @property
    def is_rehearsal(self) -> bool:
        """Whether the processor replaces a CUDA device."""
        return self.device.type != "cuda"

    def make_workload(self, shape: str) -> CudaWorkload:
        """Return the work to measure for a shape."""
        if not self.is_rehearsal:
            return CudaWorkload(shape, load_shape_config(shape), self.device)
        config = make_little_config(hidden=64, layers=2)
        little = CudaWorkload(f"little {shape}", config, self.device)
        return replace(little, steps=4, context=8, prompt=16, copy_bytes=1 << 20)


ON_DEVICE = CheckScale(CUDA, RoutedShape(layers=4), 4000)
REHEARSAL = CheckScale(
    CPU,
    RoutedShape(layers=1, hidden=128, heads=2, experts=8, used=2, intermediate=32, vocabulary=512),
    400,
    rounds=1,
)


def make_little_config(*, hidden: int, layers: int) -> ModelConfig:
    """Return the configuration of a small base with the layers of Qwen3."""
    document: JsonObject = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    return parse_model_config(document)


def measure_numerics(scale: CheckScale) -> Iterator[Row]:
    """Compare the logits of a small base in each dtype with those of float64.

    Three sequences are decoded as one batch: the base alone, one expert, and ten.
    """
    config = make_little_config(hidden=256, layers=4)
    experts = [make_random_expert(config, seed, device=CPU) for seed in range(EXPERTS)]
    chains = [experts[:0], experts[:1], experts]
    drawn = make_random_weights(config, CPU)
    ids = [make_prompt_ids((PROMPT + STEPS) * (n + 1), 512)[-(PROMPT + STEPS) :] for n in range(3)]
    wide = _convert(drawn, torch.float64, CPU)
    plans = [compile_plan(config, chain, CPU) for chain in chains]
    exact = [compute_exact_logits(config, wide, *each) for each in zip(ids, plans, strict=True)]
    wanted = np.stack([logits[PROMPT - 1 :].numpy() for logits in exact])
    for dtype, limit in LIMITS.items():
        decoder = CudaGraphDecoder(config, _convert(drawn, dtype, scale.device))
        found = _compute_logits(
            decoder, ids, [compile_plan(config, chain, scale.device) for chain in chains], dtype
        )
        decoder.close()
        error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        yield judge_error(f"logits in {str(dtype).removeprefix('torch.')}", error, limit)


def judge_error(case: str, error: float, limit: float) -> Row:
    """Return the row of a relative error and the largest that is allowed."""
    figure = float(f"{error:.2g}")
    return judge(
        Row(
            case, figure, "largest allowed, to float64", limit, "of the largest", "lower",
            float(f"{error / limit:.2g}"), None,
        ),
        "<= 1",
    )  # fmt: skip


def compute_exact_logits(
    config: ModelConfig, weights: BaseWeights, ids: Sequence[int], deltas: TorchDeltas
) -> Tensor:
    """Return all logits of a sequence by the plain formulas, in the dtype of the weights.

    The base has no sliding windows.
    """
    cos, sin = compute_rope_table(config.rope, len(ids), device=CPU).to(weights.dtype)
    x = weights.tensors[EMBEDDING_TENSOR][list(ids)]

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, config.norm_eps)

    def split_heads(x: Tensor, norm: NormWeights | None) -> Tensor:
        heads = x.view(len(x), -1, config.head_dim)
        return (heads if norm is None else normalise(heads, norm.weight)).transpose(0, 1)

    transformer = Transformer(config, weights)
    for layer in transformer.layers:
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        mixer, normed = layer.mixer, normalise(x, layer.input_norm.weight)
        assert isinstance(mixer, AttentionWeights)
        assert mixer.key is not None
        assert mixer.value is not None
        queries = split_heads(mixer.query(normed, deltas), mixer.query_norm)
        keys = split_heads(mixer.key(normed, deltas), mixer.key_norm)
        values = split_heads(mixer.value(normed, deltas), None)
        queries, keys = (apply_rope(each, cos, sin) for each in (queries, keys))
        attended = reference_attention(queries, keys, values, window=None)
        x = x + mixer.output(attended, deltas)
        x = x + layer.mlp(normalise(x, layer.mlp_norm.weight), deltas)
    return transformer.head(normalise(x, weights.tensors["model.norm.weight"]), deltas)


def _convert(weights: BaseWeights, dtype: torch.dtype, device: torch.device) -> BaseWeights:
    """Return the same weights on a device, matrices in a dtype, others in float32 at least."""
    other = torch.float64 if dtype is torch.float64 else torch.float32
    tensors = {
        name: tensor.to(device, dtype if tensor.ndim == 2 else other)
        for name, tensor in weights.tensors.items()
    }
    return BaseWeights(tensors, dtype, device)


def _compute_logits(
    decoder: CudaGraphDecoder,
    ids: Sequence[Sequence[int]],
    plans: Sequence[TorchDeltas],
    dtype: torch.dtype,
) -> AnyArray:
    """Return logits from the last token of each prompt on, [sequences, 1 + steps, vocab]."""
    cache = StaticKVCache(
        decoder.config, rows=len(ids), capacity=PROMPT + STEPS, dtype=dtype, device=decoder.device
    )
    rows = [cache.get_row(number) for number in range(len(ids))]
    texts = list(zip(ids, rows, plans, strict=True))
    found = [
        np.stack([decoder.prefill(each[:PROMPT], row, plan).logits for each, row, plan in texts])
    ]
    for place in range(PROMPT, PROMPT + STEPS):
        found.append(decoder.step([GraphStepRow(e[place], row, plan) for e, row, plan in texts]))
    return np.stack(found, axis=1)


def measure_speed(scale: CheckScale, shape: str) -> Iterator[Row]:
    """Measure steps and prompts of a shape."""
    for row in measure_workload(scale.make_workload(shape), scale.rounds):
        yield _keep_unjudged(row) if scale.is_rehearsal else row


def measure_routed(scale: CheckScale) -> Iterator[Row]:
    """Measure decoding with some routed experts resident; its base is written and deleted."""
    trace, shape = make_trace(scale.routed, scale.tokens), scale.routed
    simulates = f"{shape.layers} layers, {shape.experts} experts, {shape.used} used"
    with TemporaryDirectory() as folder:
        base = write_base(Path(folder), shape, trace)
        if not scale.is_rehearsal:
            yield compare_on_device(
                base, tokens=len(trace), simulates=simulates, rounds=scale.rounds
            )
            return
        setup = DeviceSetup(base, len(trace), device=str(scale.device))
        with EngineProcess(make_opener(setup)) as process:
            yield _keep_unjudged(
                measure_turns(process.run, simulates=simulates, rounds=scale.rounds)
            )


def _keep_unjudged(row: Row) -> Row:
    """Return a row whose target is neither met nor missed."""
    return replace(row, ok=None)


def describe_machine() -> dict[str, object]:
    """Describe the machine: versions, and its CUDA device if torch finds one."""
    found: dict[str, object] = {
        "expertctl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": None,
    }
    if is_cuda_available():
        _, memory = torch.cuda.mem_get_info()
        found |= {"device": get_device_name(), "memory": memory, "cuda": torch.version.cuda}
    return found


PARTS: dict[str, Callable[[CheckScale], Iterator[Row]]] = {
    "numerics": measure_numerics,
    **{shape: partial(measure_speed, shape=shape) for shape in SHAPES},
    "routed": measure_routed,
}


def main() -> None:
    """Measure one part, or describe the machine; write a JSON document to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts")
    parser.add_argument("part", choices=["machine", *PARTS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    document: object = describe_machine()
    if options.part != "machine":
        scale = REHEARSAL if options.rehearse else ON_DEVICE
        document = [asdict(row) for row in PARTS[options.part](scale)]
    options.file.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
