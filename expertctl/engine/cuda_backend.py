"""A base that torch holds and runs on a CUDA device, with captured steps.

Weights are float32 or bfloat16, keys and values the same, activations and experts float32. Nothing
else is here, so on a processor the same classes run in tests.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine import accelerator
from expertctl.engine.backend import BackendName, Surroundings
from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.generate import NativeReading, Reading, step_each
from expertctl.engine.kept_kv import CacheKind, KVSlots
from expertctl.engine.kv_loan import KVWanted
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.static_decoder import StaticDecoder, buffer_bytes
from expertctl.engine.static_kv import ArenaRow, KVArena, arena_bytes
from expertctl.engine.tiers import Tiers
from expertctl.engine.torch_backend import TorchBackend, torch_dtype
from expertctl.package.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """A base that `StaticDecoder` runs; its memory is that of the device."""

    config: ModelConfig
    dtype: str

    @property
    def name(self) -> BackendName:
        """Which of them it is."""
        return "cuda"

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""
        return self._plain.weight_bytes

    @property
    def cache(self) -> None:
        """It runs no routed experts."""

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

        Texts of a batch are read one after the other.
        """
        return buffer_bytes(self.config, capacity=tokens, width=width)

    @property
    def kv_kind(self) -> str:
        """The same where one keeper serves."""
        return f"cuda, {self.dtype}"

    def new_keeper(self, tiers: Tiers) -> KVSlots:
        """Return an owner of arenas of one row."""
        kind = CacheKind(self._row, lambda wanted: self.kv_bytes(wanted.capacity))
        return KVSlots(tiers, kind)

    def load(self, around: Surroundings, *, progress: Progress = no_progress) -> "CudaModel":
        """Read the weights onto the device.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        plain = self._plain.load(around, progress=progress)
        return CudaModel(StaticDecoder(self.config, plain.weights), plain.weights, plain.read_bytes)

    @property
    def _plain(self) -> TorchBackend:
        return TorchBackend(self.config, self.dtype, accelerator.CUDA)

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
    """How much of files was read for them."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weights.nbytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.weights.warnings

    @property
    def routed(self) -> None:
        """It runs no routed experts."""

    @property
    def counters(self) -> None:
        """It runs no routed experts."""

    @property
    def experts(self) -> None:
        """It runs no routed experts."""

    def prepare(self, cache: KVRoom, plan: CompiledPlan, *, tokens: int, rows: int = 1) -> None:
        """Take the memory of steps and put the plan into its slot; graphs come with the steps."""
        assert isinstance(cache, ArenaRow)
        self.decoder.prepare(cache, plan.deltas)

    def reading(
        self, cache: KVRoom, plan: CompiledPlan, *, progress: Progress = no_progress
    ) -> Reading:
        """Begin or go on with a text."""
        assert isinstance(cache, ArenaRow)
        return NativeReading(self.decoder, cache, plan.deltas, plan.soft_prompt, progress)

    def step(self, texts: Sequence[tuple[Reading, int]]) -> Tensor:
        """Read one more token of each of several texts, one after the other."""
        return step_each(texts)

    def timed(self, times: LayerTimes) -> AbstractContextManager[None]:
        """Have the time of each part of what is read meanwhile added; steps are not captured."""
        return self.decoder.timed(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, copied to where experts are compiled."""
        return self.decoder.matrix(module).cpu()

    def rest(self) -> None:
        """Let go of graphs, buffers and slots."""
        self.decoder.rest()

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.is_at_rest

    def close(self) -> None:
        """Do nothing: nothing runs in the background."""
