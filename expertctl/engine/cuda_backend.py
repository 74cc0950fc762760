"""A base that torch holds and runs on a CUDA device, with captured steps.

Weights are float32 or bfloat16, keys and values the same, activations and experts float32. Routed
experts are in a stack, all of them or as many as fit. Nothing else here depends on the device,
so tests run the same classes on a processor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine import accelerator
from expertctl.engine.accelerator import told_when_full
from expertctl.engine.backend import BackendName, Surroundings
from expertctl.engine.base_weights import BaseWeights, is_routed_expert, load_base
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.decoder import PrefillResult
from expertctl.engine.generate import NativeReading, Reading, step_each
from expertctl.engine.kept_kv import CacheKind, KVSlots
from expertctl.engine.kv_loan import KVWanted
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.moe.asked_experts import AskedExperts, asked_bytes
from expertctl.engine.moe.bookkeeping import known_bytes, whole_bookkeeping_bytes
from expertctl.engine.moe.cache_plan import CachePlan, cache_plan, fits_whole
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_stack import StackShape, buffers_bytes, stack_bytes
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.moe.stacked_experts import StackedExperts, lookup_bytes, open_experts
from expertctl.engine.moe.stacked_room import received_bytes
from expertctl.engine.moe.start import Start, StartOf, begin
from expertctl.engine.prompt_scores import ScoreRows
from expertctl.engine.static_decoder import StaticDecoder, buffer_bytes, step_buffer_bytes
from expertctl.engine.static_kv import ArenaRow, KVArena, arena_bytes
from expertctl.engine.static_stages import ROWS, staying_bytes, staying_graphs_bytes
from expertctl.engine.tiers import Tiers
from expertctl.engine.torch_backend import TorchBackend, torch_dtype
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import MoeMiss

_FLOAT_BYTES = 4
_STREAMS, _STAGED_STREAMS = 2, 3
"""Products are computed on the usual stream, and on one for each owner of graphs."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """A base that `StaticDecoder` runs; its memory is that of the device."""

    config: ModelConfig
    dtype: str
    cache: CachePlan | None = None
    """How its routed experts are held where not all of them are on the device."""
    start: Start = field(default=Start(), compare=False)
    """Which of them it begins with."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: str,
        *,
        room: int | None = None,
        miss: MoeMiss = "exact",
        cap: float = 1.0,
        beside: int = 0,
    ) -> "CudaBackend":
        """Return what runs a base in ``room`` bytes of the device; None: unlimited.

        Of these, ``beside`` bytes are left for what a run takes besides the base.
        """
        whole = cls(config, dtype)
        if config.experts is None or room is None:
            return whole
        if fits_whole(whole.weight_bytes, room, texts=beside):
            return whole
        workspaces = _STAGED_STREAMS * accelerator.workspace_bytes()
        plan = cache_plan(
            layers=len(config.experts.layers),
            experts=config.experts.count,
            block=whole.stack_shape.nbytes,
            rest=whole.least_bytes + whole.staged_bytes + workspaces,
            limit=room,
            miss=miss,
            cap=cap,
            texts=beside,
        )
        return replace(whole, cache=plan)

    def begun(self, start: StartOf) -> "CudaBackend":
        """Return the same with slots and pins by what is known, where not all experts fit.

        Raises:
            ExpertError: when a profile is of another base, or cannot be used.
        """
        routed = self.config.experts
        if self.cache is None or routed is None:
            return self
        begins = start(routed)
        return replace(self, cache=begins.planned(self.cache, routed.layers), start=begins)

    @property
    def name(self) -> BackendName:
        """Which of them it is."""
        return "cuda"

    @property
    def weight_bytes(self) -> int:
        """What its weights and workspaces take in memory, with as many routed experts as fit."""
        routed, workspaces = self.config.experts, self.workspace_bytes
        if routed is None:
            return self._plain.weight_bytes + workspaces
        each, rest = self.stack_shape.nbytes, self.least_bytes + workspaces
        if self.cache is None:
            blocks = len(routed.layers) * routed.count
            return rest + asked_bytes(routed) + blocks * each
        return rest + self.staged_bytes + self.cache.blocks * each

    @property
    def workspace_bytes(self) -> int:
        """What libraries keep for the streams that it computes on, in one thread."""
        streams = _STREAMS if self.cache is None else _STAGED_STREAMS
        return streams * accelerator.workspace_bytes()

    @property
    def staged_bytes(self) -> int:
        """What steps in stages hold between texts: their room, and the pool of their graphs."""
        graphs = staying_graphs_bytes(self.config, self.stack_shape)
        return staying_bytes(self.config) + graphs

    @property
    def least_bytes(self) -> int:
        """What all but routed experts takes, the dummy and the lookup included; see `Backend`."""
        routed, itemsize = self.config.experts, torch_dtype(self.dtype).itemsize
        if routed is None:
            return self.weight_bytes
        total = lookup_bytes(routed) + stack_bytes(self.stack_shape, blocks=0)
        for name, shape in self.config.tensor_shapes().items():
            if not is_routed_expert(name):
                total += torch.Size(shape).numel() * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def stack_shape(self) -> StackShape:
        """What a routed expert looks like."""
        return StackShape.of(self.config, torch_dtype(self.dtype))

    @property
    def host_bytes(self) -> int:
        """The buffers that routed experts come through, and what is known of them."""
        if self.config.experts is None:
            return 0
        buffers = buffers_bytes(self.stack_shape)
        if self.cache is None:
            return buffers + whole_bookkeeping_bytes(self.config.experts)
        return known_bytes(self.config.experts) + buffers + received_bytes(self.config, rows=ROWS)

    @property
    def loading_bytes(self) -> int:
        """What reading them takes besides: they are converted before they come to the device."""
        return 0

    @property
    def form(self) -> Form:
        """What plans are compiled for."""
        return self._plain.form

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return arena_bytes(self.config, capacity=tokens, dtype=torch_dtype(self.dtype))

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens needs besides weights and cache, at most about.

        Texts of a batch are read one after the other. A step may be called while the graphs of
        another kind hold as much; stages that copy experts have graphs in `staged_bytes`.
        """
        experts = None if self.config.experts is None else self.stack_shape
        captured = experts if self.cache is None else None
        graphs = step_buffer_bytes(self.config, capacity=tokens, width=width, experts=captured)
        return graphs + buffer_bytes(self.config, capacity=tokens, width=width, experts=experts)

    @property
    def kv_kind(self) -> str:
        """Equal where one keeper serves."""
        return f"cuda, {self.dtype}"

    def new_keeper(self, tiers: Tiers, *, kept_limit: int | None = None) -> KVSlots:
        """Return an owner of arenas of one row."""
        kind = CacheKind(self._row, lambda wanted: self.kv_bytes(wanted.capacity))
        return KVSlots(tiers, kind, kept_limit=kept_limit)

    @told_when_full()
    def load(self, around: Surroundings, *, progress: Progress = no_progress) -> "CudaModel":
        """Read the weights onto the device.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
            BudgetError: when the device is full.
        """
        weights = load_base(
            around.directory,
            self.config,
            dtype=torch_dtype(self.dtype),
            device=accelerator.CUDA,
            experts=False,
            progress=progress,
        )
        workspaces = self.workspace_bytes
        if self.config.experts is None:
            decoder = StaticDecoder(self.config, weights)
            return CudaModel(decoder, weights, weights.nbytes, workspaces)
        experts = open_experts(
            self.config,
            base_tensors(around.directory, self.config),
            self.stack_shape,
            plan=self.cache,
            device=accelerator.CUDA,
        )
        try:
            read = self._bring(experts, around, progress)
        except BaseException:
            experts.close()
            raise
        decoder = StaticDecoder(self.config, weights, experts=experts)
        return CudaModel(decoder, weights, weights.nbytes + read, workspaces, experts)

    def _bring(self, experts: StackedExperts, around: Surroundings, progress: Progress) -> int:
        """Bring all experts, or begin with those that are known; return how much was read.

        A cache counts what it reads itself. Habits are learnt either way.
        """
        cache, routed = experts.cache, experts.config
        if cache is None:
            assert experts.asked is not None
            around.watch(routed, experts.asked)
            return experts.fill_all(progress)
        begin(cache, self.start, dict(zip(routed.layers, cache.slots, strict=True)))
        around.watch(routed, cache)
        return 0

    @property
    def _plain(self) -> TorchBackend:
        return TorchBackend(self.config, self.dtype, accelerator.CUDA)

    @told_when_full()
    def _row(self, wanted: KVWanted) -> ArenaRow:
        arena = KVArena(
            self.config,
            rows=1,
            capacity=wanted.capacity,
            dtype=torch_dtype(self.dtype),
            device=accelerator.CUDA,
        )
        return arena.row(0)


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A base in the memory of the device."""

    decoder: StaticDecoder
    weights: BaseWeights
    read_bytes: int
    """How many bytes of files were read for them."""
    workspace_bytes: int
    """What libraries keep for the streams that it is run on."""
    stacked: StackedExperts | None = None
    """Its routed experts, if it has any."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of all that stays with them."""
        held = self.weights.nbytes + self.workspace_bytes
        if self.stacked is None:
            return held
        graphs = 0
        if not self.stacked.is_whole:
            graphs = staying_graphs_bytes(self.decoder.config, self.stacked.stack.shape)
        return held + self.stacked.nbytes + self.decoder.staying_bytes + graphs

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.weights.warnings

    @property
    def routed(self) -> RoutedReport | None:
        """What became of routed experts so far, fetched from the device; None without them."""
        self.decoder.fetch_asked()
        experts = self._counted
        return None if experts is None else experts.report()

    @property
    def counters(self) -> Counters | None:
        """What is counted of routed experts; where all are there, only when an answer is over."""
        return None if self._counted is None else self._counted.counters

    @property
    def experts(self) -> ExpertCache | None:
        """The owner of their slots, which applies profiles; None where all are there."""
        return None if self.stacked is None else self.stacked.cache

    @property
    def _counted(self) -> ExpertCache | AskedExperts | None:
        return None if self.stacked is None else self.stacked.cache or self.stacked.asked

    def prepare(self, cache: KVRoom, plan: CompiledPlan, *, tokens: int, rows: int = 1) -> None:
        """Take the memory of steps and put the plan into its slot; graphs come with the steps."""
        assert isinstance(cache, ArenaRow)
        self.decoder.prepare(cache, plan.deltas)

    def reading(
        self,
        cache: KVRoom,
        plan: CompiledPlan,
        *,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> Reading:
        """Begin or go on with a text."""
        assert isinstance(cache, ArenaRow)
        return NativeReading(self.decoder, cache, plan.deltas, plan.soft_prompt, progress, scores)

    @property
    def prefill_parts(self) -> int:
        """1: a pass is not cut."""
        return 1

    def prefill(
        self, reading: Reading, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt at once."""
        return reading.prefill(ids)

    def step(self, texts: Sequence[tuple[Reading, int]]) -> Tensor:
        """Read one more token of each of several texts, one after the other."""
        return step_each(texts)

    def timed(self, times: LayerTimes) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read takes; no step is captured then."""
        return self.decoder.timed(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, copied to where experts are compiled."""
        return self.decoder.matrix(module).cpu()

    def rest(self) -> None:
        """Let go of buffers and slots, and of graphs that read a text."""
        self.decoder.rest()

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.is_at_rest

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        if self.stacked is not None:
            self.stacked.check_integrity()

    def close(self) -> None:
        """End what is being read, and let go of all graphs."""
        if self.stacked is not None:
            self.stacked.close()
        self.decoder.close()
