"""A base that torch holds and runs: every size, tiny ones in less time than numba's import."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.backend import BackendName, Surroundings
from expertctl.engine.base_weights import BaseWeights, load_base
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.decoder import Decoder, PrefillResult, pass_bytes
from expertctl.engine.generate import NativeReading, Reading, step_each
from expertctl.engine.kept_kv import KVSlots
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.moe.report import RoutedReport, whole_report
from expertctl.engine.prompt_scores import ScoreRows
from expertctl.engine.sampling import sample_bytes
from expertctl.engine.tiers import Tiers
from expertctl.errors import UsageError
from expertctl.package.model_config import ModelConfig

TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_FLOAT_BYTES = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """A base that `Decoder` runs."""

    config: ModelConfig
    dtype: str
    device: torch.device = _CPU

    @property
    def name(self) -> BackendName:
        """Which of the two it is."""
        return "torch"

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory: norms and biases stay float32."""
        total, itemsize = 0, torch_dtype(self.dtype).itemsize
        for shape in self.config.tensor_shapes().values():
            total += torch.Size(shape).numel() * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def least_bytes(self) -> int:
        """The same: all of its experts are in memory."""
        return self.weight_bytes

    @property
    def cache(self) -> None:
        """None: all of them are in memory."""

    @property
    def loading_bytes(self) -> int:
        """What reading them takes besides: nothing, as files are mapped into memory."""
        return 0

    @property
    def host_bytes(self) -> int:
        """0: they are in no other memory."""
        return 0

    @property
    def form(self) -> Form:
        """What plans are compiled for."""
        config = self.config
        return Form(config.linear_shapes(), config.hidden_size, torch.float32, self.device)

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return self.config.kv_bytes(tokens, itemsize=_FLOAT_BYTES)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens needs besides weights and cache, at most about.

        Texts of a batch are read one after the other; then the scores of all are put together.
        """
        vocabulary = self.config.vocab_size
        scores = 2 * (rows - 1) * vocabulary * _FLOAT_BYTES
        return pass_bytes(self.config, tokens) + scores + sample_bytes(vocabulary)

    @property
    def kv_kind(self) -> str:
        """Equal where one keeper serves."""
        return "torch"

    def new_keeper(self, tiers: Tiers, *, kept_limit: int | None = None) -> KVSlots:
        """Return an owner of caches."""
        return KVSlots(tiers, kept_limit=kept_limit)

    def load(self, around: Surroundings, *, progress: Progress = no_progress) -> "TorchModel":
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        read: list[int] = []

        def count(size: int) -> None:
            read.append(size)
            progress(size)

        weights = load_base(
            around.directory,
            self.config,
            dtype=torch_dtype(self.dtype),
            device=self.device,
            progress=count,
        )
        return TorchModel(Decoder(self.config, weights), weights, sum(read))


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A base in torch's memory."""

    decoder: Decoder
    weights: BaseWeights
    read_bytes: int
    """How many bytes of files were read for them."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weights.nbytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.weights.warnings

    @property
    def routed(self) -> RoutedReport | None:
        """All experts are there; None where it has none."""
        return whole_report(self.decoder.config)

    @property
    def counters(self) -> None:
        """None: where all experts are there, nothing is counted."""

    @property
    def experts(self) -> None:
        """None: where all experts are there, a profile changes nothing."""

    def prepare(self, cache: KVRoom, plan: CompiledPlan, *, tokens: int, rows: int = 1) -> None:
        """Do nothing: torch makes nothing beforehand."""

    def reading(
        self,
        cache: KVRoom,
        plan: CompiledPlan,
        *,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> Reading:
        """Begin or go on with a text."""
        assert isinstance(cache, KVCache)
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
        """Add to ``times`` how long each part of what is read meanwhile takes."""
        return self.decoder.timed(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        return self.decoder.matrix(module)

    def rest(self) -> None:
        """Let go of what the passes of a generation share."""
        self.decoder.rest()

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.is_at_rest

    def check_integrity(self) -> None:
        """Do nothing: its weights are only read."""

    def close(self) -> None:
        """Do nothing: torch's threads are those of the whole process."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch holds matrices in.

    Raises:
        UsageError: for a name that torch has no such dtype for.
    """
    if name not in TORCH_DTYPES:
        raise UsageError(
            f"torch does not hold a base in {name[:40]!r}, only in {' or '.join(TORCH_DTYPES)}",
            hint="--dtype float32 is always possible",
        )
    return TORCH_DTYPES[name]
