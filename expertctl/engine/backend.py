"""What holds a base and runs it: torch, packed kernels, or CUDA. The runtime sees only these.

A backend knows before anything is loaded what all of it will take, to the byte. A cache, a model
and a plan that are used together come from the same backend.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.decoder import PrefillResult
from expertctl.engine.generate import Reading
from expertctl.engine.kv_loan import KVLoan, KVWanted
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.moe.adoption import Guided
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.habit_keeper import Watchable
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.prompt_scores import ScoreRows
from expertctl.engine.tiers import Tiers
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.settings import Home
from expertctl.store.quantised_copies import QuantisedCopies
from expertctl.telling import Tell, tell_nobody

BackendName = Literal["torch", "packed", "cuda"]
Watch = Callable[[ExpertsConfig, Watchable], None]


def watch_nobody(_: ExpertsConfig, __: Watchable) -> None:
    """Learn nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a base is loaded with: its files, where things may be kept, threads to compute."""

    directory: Path
    home: Home
    copies: QuantisedCopies | None = None
    threads: int = 1
    tell: Tell = tell_nobody
    check: Callable[[], None] | None = None
    """Called before each kernel is compiled; what it raises ends that."""
    watch: Watch = watch_nobody
    """Gets the owner of routed experts, to learn which are asked for."""


class Model(Protocol):
    """A base in memory that can be run; its weights are only read."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""

    def prepare(self, cache: KVRoom, plan: CompiledPlan, *, tokens: int, rows: int = 1) -> None:
        """Make beforehand what reading so many tokens of a prompt, and ``rows`` answers, needs."""

    def reading(
        self,
        cache: KVRoom,
        plan: CompiledPlan,
        *,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> Reading:
        """Begin or go on with a text; ``progress`` counts tokens of its prompt and may raise.

        ``scores`` gets the logits of every position of the prompt that is read.
        """

    @property
    def prefill_parts(self) -> int:
        """Into how many parts `prefill` cuts a pass over a prompt; 1 where it cannot be cut."""

    def prefill(
        self, reading: Reading, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt, and call ``between_layers`` between the parts of a pass.

        That may call `step` with other texts; it changes no bit of either.
        """

    def step(self, texts: Sequence[tuple[Reading, int]]) -> Tensor:
        """Read one more token of each of several texts; return scores, float32 [texts, vocab].

        What a text gets is what it would get alone.
        """

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""

    @property
    def read_bytes(self) -> int:
        """How many bytes of files were read for them."""

    @property
    def routed(self) -> RoutedReport | None:
        """What became of routed experts since it was loaded; None where it has none."""

    @property
    def counters(self) -> Counters | None:
        """What is counted of them, layer by layer; None where nothing is counted."""

    @property
    def experts(self) -> Guided | None:
        """The owner of their slots, which applies profiles; None where all are in memory."""

    def timed(self, times: LayerTimes) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""

    def rest(self) -> None:
        """Let go of what the passes of a generation share; it was part of their buffers."""

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""

    def close(self) -> None:
        """End what it does in the background; it is not run after that."""


class KVKeeper(Protocol):
    """The owner of keys and values: of those that are kept, and of those that are lent."""

    def borrow(self, wanted: KVWanted) -> AbstractContextManager[KVLoan[KVRoom]]:
        """Lend room for one generation, with the rows of it that were computed before.

        Raises:
            BudgetError: when it cannot fit.
        """

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key."""

    def clear(self) -> None:
        """Drop all that is kept; nothing of it may be lent."""

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that it holds."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of those that are kept and not lent."""

    def check_integrity(self) -> None:
        """Assert what always holds."""

    def check_idle(self) -> None:
        """Assert that nothing is lent."""


class Backend(Protocol):
    """One base in one dtype, before it is loaded."""

    @property
    def name(self) -> BackendName:
        """Which of them it is."""

    @property
    def config(self) -> ModelConfig:
        """The base's configuration."""

    @property
    def dtype(self) -> str:
        """What its matrices are held in."""

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""

    @property
    def least_bytes(self) -> int:
        """The same where no routed expert is in memory; a run needs some of them besides."""

    @property
    def cache(self) -> CachePlan | None:
        """How its routed experts are held, where not all of them are in memory."""

    @property
    def loading_bytes(self) -> int:
        """What reading them takes besides, at most."""

    @property
    def host_bytes(self) -> int:
        """What they take of the machine's memory where they are in that of a device."""

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens, or one token of ``rows`` texts, needs besides.

        ``width`` is that of the widest compiled plan.
        """

    @property
    def form(self) -> Form:
        """What plans are compiled for."""

    @property
    def kv_kind(self) -> str:
        """Equal for backends that can share one keeper of keys and values."""

    def new_keeper(self, tiers: Tiers, *, kept_limit: int | None = None) -> KVKeeper:
        """Return an owner of keys and values of the kind that its models read.

        ``kept_limit``: the most bytes that it keeps when no text has them; None: what is free.
        """

    def load(self, around: Surroundings, *, progress: Progress) -> Model:
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
