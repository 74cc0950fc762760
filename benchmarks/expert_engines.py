"""The engines that compose and batch compare: a base in bfloat16, with bfloat16 LoRAs of rank 16.

All experts are different and adapt all seven projections; bases and experts have random weights.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from benchmarks.engine_process import MeasuredEngine, make_prompt_ids
from benchmarks.harness import Seconds, time_action
from benchmarks.inputs import (
    HIDDEN,
    PROJECTIONS,
    RANK,
    list_module_shapes,
    make_base_config,
    make_config_document,
)

PEFT_INSTALL = "pip install peft transformers"
CONTEXT, TOKENS = 16, 8
"""Tokens of context, and the number of steps in one measurement."""
LORA_SCALE, SPREAD = 2.0, 0.02
THREADS = (2,)


@dataclass(frozen=True, slots=True)
class DecodeTogether:
    """Decode one sequence with the first so many experts active at once."""

    experts: int


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Decode so many sequences in one batch: each with one of the experts, or all without."""

    texts: int
    experts: int

    @property
    def expert_indices(self) -> list[int]:
        """Return the expert index of each sequence; -1 for none."""
        return [text % self.experts if self.experts else -1 for text in range(self.texts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch:
    """Process prompts in one batch, each with its own expert, and generate answers."""

    texts: int
    prompt: int
    tokens: int


Task = DecodeTogether | DecodeBatch
OpenEngine = Callable[[], MeasuredEngine[Task]]
PeftTask = Task | AnswerBatch


def open_ours(experts: int, *, together: Sequence[int] = ()) -> OpenEngine:
    """Return a function that opens our engine with experts, and plans of the first so many."""
    return partial(_OurExpertEngine, experts, tuple(together))


def open_peft(experts: int) -> Callable[[], MeasuredEngine[PeftTask]]:
    """Return a function that opens transformers and PEFT with so many experts."""
    return partial(_PeftEngine, experts)


def has_peft() -> bool:
    """Whether PEFT and transformers are installed."""
    return all(find_spec(name) is not None for name in ("peft", "transformers"))


class _OurExpertEngine:
    def __init__(self, experts: int, together: Sequence[int]) -> None:
        from expertctl.engine.cpu.base_loader import create_random_base, decode_bytes_per_token
        from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
        from expertctl.engine.kernels.packed_format import Scheme
        from expertctl.engine.kernels.thread_pool import ThreadPool
        from expertctl.engine.kv.block_pool import PagedKVCache

        with closing(ThreadPool(1)) as crew:
            check_experts(crew)
        base = create_random_base(make_base_config(), Scheme.BFLOAT16)
        loras = _make_loras(experts)
        self._alone = [_make_plan([lora]) for lora in loras]
        self._together = {count: _make_plan(loras[:count]) for count in together}
        self._row, self._pages = DecodeRow, PagedKVCache
        self._decoders = {count: PackedDecoder(base, ThreadPool(count)) for count in THREADS}
        self._config = base.config
        self.weight_bytes = decode_bytes_per_token(base)
        self.about = "ours, bfloat16"

    def run(self, task: Task, threads: int) -> Seconds:
        """Run a task with so many workers."""
        match task:
            case DecodeTogether(experts):
                plans = [self._together[experts] if experts else None]
            case DecodeBatch():
                plans = [None if place < 0 else self._alone[place] for place in task.expert_indices]
        return self._decode(plans, threads)

    def _decode(self, plans: Sequence[Any], threads: int) -> Seconds:
        import numpy as np

        decoder, vocabulary = self._decoders[threads], self._config.vocab_size
        texts = [(self._pages(self._config, CONTEXT + TOKENS), plan) for plan in plans]
        for cache, plan in texts:
            decoder.prefill(make_prompt_ids(CONTEXT, vocabulary), cache, plan)
        scores = np.empty((len(plans), vocabulary), np.float32)

        def decode() -> None:
            for token in make_prompt_ids(TOKENS, vocabulary):
                decoder.step([self._row(token, *text) for text in texts], out=scores)

        seconds = time_action(decode)()
        for cache, _ in texts:
            cache.check_integrity()
        return seconds


def check_experts(crew: Any, *, spread: float = SPREAD) -> None:
    """Assert on two layers that experts give the torch formulas' results, and have an effect."""
    import numpy as np

    from benchmarks.oracle import SEED, TOLERANCE, TorchReference, assert_same, make_small_config
    from expertctl.engine.adapters.compile import CompileSpec, TorchPlacement, fold_plan
    from expertctl.engine.cpu.base_loader import create_random_base
    from expertctl.engine.cpu.decoder import PackedDecoder
    from expertctl.engine.kernels.packed_format import Scheme
    from expertctl.engine.kv.block_pool import PagedKVCache

    config = make_small_config()
    base = create_random_base(config, Scheme.BFLOAT16, seed=SEED)
    decoder, ids = PackedDecoder(base, crew), make_prompt_ids(CONTEXT, config.vocab_size)
    alone = decoder.prefill(ids, PagedKVCache(config, CONTEXT)).logits
    modules = {
        name: shape
        for name, shape in list_module_shapes().items()
        if name in config.linear_shapes()
    }
    loras = _make_loras(2, modules, spread=spread)
    for chain in (loras[:1], loras):
        plan = _make_plan(chain, modules)
        assert plan.modules == modules.keys(), "experts are not on all projections"
        form = CompileSpec(modules, HIDDEN, TorchPlacement("cpu"))
        theirs = TorchReference(base).read(ids, fold_plan(chain, form).compile().torch_deltas)
        ours = decoder.prefill(ids, PagedKVCache(config, CONTEXT), plan).logits
        assert_same(ours, theirs, TOLERANCE[Scheme.BFLOAT16])
        changed = float(np.abs(ours - alone).max() / alone.std())
        assert changed > 2 * TOLERANCE[Scheme.BFLOAT16], "experts change nothing"


def _make_loras(
    count: int, modules: Mapping[str, tuple[int, int]] | None = None, *, spread: float = SPREAD
) -> list[Any]:
    """Return experts in their loaded form, each with one LoRA on every projection."""
    import torch

    from expertctl.engine.adapters.compile import WeightedAdapter
    from expertctl.engine.adapters.load import LoadedAdapter
    from expertctl.engine.adapters.steps import LoraTensors
    from expertctl.engine.torch.plan import to_array

    def drawn(*shape: int) -> Any:
        return to_array((torch.randn(shape) * spread).bfloat16())

    torch.manual_seed(0)
    return [
        WeightedAdapter(
            LoadedAdapter(
                f"bench/lora-{number}@1.0.0",
                {
                    module: (LoraTensors(drawn(RANK, into), drawn(out, RANK), LORA_SCALE),)
                    for module, (out, into) in (modules or list_module_shapes()).items()
                },
                (),
                0,
                0,
            )
        )
        for number in range(count)
    ]


def _make_plan(chain: Sequence[Any], modules: Mapping[str, tuple[int, int]] | None = None) -> Any:
    from expertctl.engine.adapters.compile import CompileSpec, fold_plan
    from expertctl.engine.kernels.packed_format import PlanPacking, Scheme

    form = CompileSpec(modules or list_module_shapes(), HIDDEN, PlanPacking(Scheme.BFLOAT16))
    return fold_plan(chain, form).compile().packed


class _PeftEngine:
    def __init__(self, experts: int) -> None:
        import peft
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        configs: Any = AutoConfig
        models: Any = AutoModelForCausalLM
        config = configs.for_model(**make_config_document())
        base = models.from_config(config, dtype=torch.bfloat16)
        wanted: Any = peft.LoraConfig(
            r=RANK,
            lora_alpha=int(LORA_SCALE * RANK),
            target_modules=sorted(name.split(".")[1] for name in PROJECTIONS),
            init_lora_weights=False,
        )
        self.weight_bytes = sum(each.nbytes for each in base.parameters())
        self._names = [f"expert-{number}" for number in range(experts)]
        model: Any = peft.get_peft_model(
            base, wanted, adapter_name=self._names[0], autocast_adapter_dtype=False
        )
        for name in self._names[1:]:
            model.add_adapter(name, wanted, autocast_adapter_dtype=False)
        self._torch, self._model = torch, model.eval()
        self._vocabulary = config.vocab_size
        versions = f"PEFT {version('peft')}, transformers {version('transformers')}"
        self.about = f"{versions}, bfloat16"

    def run(self, task: PeftTask, threads: int) -> Seconds:
        """Run a task with so many threads."""
        self._torch.set_num_threads(threads)
        match task:
            case DecodeTogether(experts):
                self._model.base_model.set_adapter(self._names[: max(experts, 1)])
                alone = nullcontext() if experts else self._model.disable_adapter()
                with alone:
                    return self._decode(1)
            case DecodeBatch(texts):
                names = [self._names[p] if p >= 0 else "__base__" for p in task.expert_indices]
                return self._decode(texts, adapter_names=names)
            case AnswerBatch(texts=texts, prompt=prompt, tokens=tokens):
                names = [self._names[text % len(self._names)] for text in range(texts)]
                return self._answer(texts, prompt, tokens, adapter_names=names)

    def _decode(self, texts: int, **options: Any) -> Seconds:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        self._read(make_prompt_ids(CONTEXT, self._vocabulary), texts, cache, options)

        def decode() -> None:
            for token in make_prompt_ids(TOKENS, self._vocabulary):
                self._read([token], texts, cache, options)

        return time_action(decode)()

    def _answer(self, texts: int, prompt: int, tokens: int, **options: Any) -> Seconds:
        from transformers import DynamicCache

        def answer() -> None:
            cache = DynamicCache(config=self._model.config)
            self._read(make_prompt_ids(prompt, self._vocabulary), texts, cache, options)
            for token in make_prompt_ids(tokens - 1, self._vocabulary):
                self._read([token], texts, cache, options)

        return time_action(answer)()

    def _read(self, ids: Sequence[int], texts: int, cache: object, options: dict[str, Any]) -> None:
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)] * texts)
            self._model(tokens, past_key_values=cache, logits_to_keep=1, **options)
