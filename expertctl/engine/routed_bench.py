"""How a base of routed experts runs with all of them in memory, and with a share of them.

The ways are measured one after the other: each reads and writes the same texts for some rounds. The
first round fills the slots and counts only for the picture. Random texts are given, token by token;
prompts are followed by what the base is likeliest to write, the same wherever nothing is skipped.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.accelerator import device_name, told_when_full
from expertctl.engine.backend import Model
from expertctl.engine.bench_result import Series
from expertctl.engine.budget import Budget
from expertctl.engine.compose import BASE_ALONE
from expertctl.engine.cuda_backend import CudaBackend
from expertctl.engine.generate import Reading
from expertctl.engine.kernels.cpu import sold_as
from expertctl.engine.kv_loan import KVWanted
from expertctl.engine.loaded_base import OpenBase, Wish, open_base
from expertctl.engine.memory import budget_limit, usual_budget
from expertctl.engine.moe.counters import LayerCounts, Observed
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.moe.start import UNKNOWN, Start, StartWishes
from expertctl.engine.packed_backend import PackedBackend
from expertctl.engine.residents import Residents
from expertctl.engine.routed_bench_result import (
    Holding,
    Moment,
    RoutedMeasured,
    RoutedRow,
    Timeline,
)
from expertctl.engine.routed_holding import held, start_by
from expertctl.engine.threads import choose_threads
from expertctl.engine.tiers import Tier
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.routing.numerics import dtype_of
from expertctl.routing.planner import Planner
from expertctl.routing.request import DeviceName, Dtype, MoeColdWish, MoeMiss
from expertctl.telling import Tell, tell_nobody

STRETCHES = 60
"""How many stretches the picture has, at most."""
LEAST = 4
"""Tokens of a stretch, at least: a token of one layer asks for few experts."""
_OTHER_BASE = "choose another --base: one whose layers have routed experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWanted:
    """What is measured: shares resident, what happens to the rest, and the texts."""

    shares: tuple[float, ...] = (1.0, 0.6, 0.4)
    misses: tuple[MoeMiss, ...] = ("exact", "skip")
    cap: float = 0.5
    """How much of a token's weights may be skipped at most."""
    prompts: tuple[str, ...] = ()
    """Random tokens where there are none."""
    prompt_tokens: int = 64
    """Of a random text."""
    tokens: int = 64
    rounds: int = 3
    seed: int = 0
    dtype: Dtype | None = None
    threads: int | None = None
    cold: MoeColdWish = "auto"
    """How experts that have no slot come from the disk."""
    device: DeviceName = "cpu"
    start: StartWishes = UNKNOWN
    """How each way begins; what was learnt of the base has no part in it."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """All ways to hold the experts; where all are in memory nothing is missed."""
        found: list[Holding] = []
        for share in self.shares:
            misses: tuple[MoeMiss, ...] = ("exact",) if share >= 1 else self.misses
            found += [Holding(share, miss) for miss in misses]
        return tuple(dict.fromkeys(found))

    @property
    def runs(self) -> int:
        """How many texts are read: what ``progress`` counts."""
        return len(self.holdings) * self.rounds * max(len(self.prompts), 1)


@dataclass(frozen=True, slots=True)
class _Text:
    """What is read; and what follows it, if the base is not to choose that itself."""

    ids: tuple[int, ...]
    follows: tuple[int, ...] = ()


def measure_routed(
    planner: Planner,
    wanted: RoutedWanted,
    *,
    base: str,
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> RoutedMeasured:
    """Measure a base of the store; ``progress`` counts ``wanted.runs`` and may raise.

    What does not fit into the memory is left out, and a warning says so.

    Raises:
        NotFoundError: when there is no such base, or no such device.
        IncompatibleError: when it has no routed experts, or kernels do not support its sizes.
        UsageError: when texts are longer than it reads.
        BudgetError: when nothing of it fits.
    """
    limit = budget_limit(budget, wanted.device)
    opened = _opened(planner, base, wanted)
    config = opened.config.experts
    assert config is not None
    start = start_by(wanted.start, config)
    texts = _texts(opened, wanted)
    threads = wanted.threads or choose_threads(opened.weight_bytes)
    laboratory = _Laboratory(planner, opened, wanted, start, texts, threads, limit, progress, tell)
    with told_when_full():
        rows, left_out = laboratory.rows()
    return RoutedMeasured(
        what=f"base {opened.stored.name}",
        cpu=sold_as(),
        device=device_name(wanted.device),
        dtype=opened.backend.dtype,
        threads=threads,
        texts=_told(wanted),
        start=wanted.start,
        cold=wanted.cold,
        skip_cap=wanted.cap if any(row.holding.miss == "skip" for row in rows) else None,
        seed=None if wanted.prompts else wanted.seed,
        experts=config.count,
        used=config.used,
        layers=len(config.layers),
        rows=rows,
        warnings=(*opened.warnings, *left_out),
    )


def _opened(planner: Planner, name: str, wanted: RoutedWanted) -> OpenBase:
    stored = planner.bases.find(name)
    wish = Wish(dtype=dtype_of(stored, wanted.dtype), device=wanted.device)
    opened = open_base(planner.bases, stored, wish, rehash=False, torch_below=0)
    if opened.config.experts is None:
        raise IncompatibleError(f"{name} has no routed experts", hint=_OTHER_BASE)
    if not isinstance(opened.backend, PackedBackend | CudaBackend):
        why = "; ".join(opened.warnings)
        raise IncompatibleError(f"bench measures what kernels do: {why}", hint=_OTHER_BASE)
    return opened


def _texts(opened: OpenBase, wanted: RoutedWanted) -> list[_Text]:
    encode, vocabulary = opened.tokenizer.encode, opened.config.vocab_size
    texts = [_Text(tuple(encode(prompt))) for prompt in wanted.prompts]
    if not texts:
        drawn = np.random.default_rng(wanted.seed)
        ids = drawn.integers(vocabulary, size=wanted.prompt_tokens + wanted.tokens).tolist()
        texts = [_Text(tuple(ids[: wanted.prompt_tokens]), tuple(ids[wanted.prompt_tokens :]))]
    longest = max(len(text.ids) for text in texts) + wanted.tokens
    if longest > opened.context:
        raise UsageError(
            f"texts of {longest} tokens are longer than the {opened.context} that the base reads",
            hint="lower --prompt-tokens or --tokens, or give a shorter --prompt",
        )
    if not all(text.ids for text in texts):
        raise UsageError("a prompt has no tokens", hint="give a --prompt with some words")
    return texts


def _told(wanted: RoutedWanted) -> str:
    count = len(wanted.prompts)
    read = f"{wanted.prompt_tokens} random tokens"
    if count:
        read = "a prompt" if count == 1 else f"{count} prompts"
    often = "once" if wanted.rounds == 1 else f"{wanted.rounds} times"
    return f"{read}, then {wanted.tokens} tokens more, {often}"


def _too_little(refused: Mapping[Holding, BudgetError]) -> BudgetError:
    """Say what the way with the fewest experts in memory would take.

    What a device itself refused is told as it is: a smaller share would not help.
    """
    least = min(refused, key=lambda holding: holding.share)
    if refused[least].__cause__ is not None:
        return refused[least]
    return BudgetError(
        f"{least.case}: {refused[least].message}",
        hint="raise --memory-budget, give --resident a smaller share, or --dtype a narrower one",
    )


@dataclass(frozen=True, slots=True)
class _Laboratory:
    """A base, and the texts by which each way to hold its experts is measured."""

    planner: Planner
    base: OpenBase
    wanted: RoutedWanted
    start: Start
    texts: list[_Text]
    threads: int
    limit: int
    """Of the memory that is computed in."""
    progress: Progress
    tell: Tell

    def rows(self) -> tuple[tuple[RoutedRow, ...], list[str]]:
        """Measure what fits; return what did not in words.

        Raises:
            BudgetError: when nothing does.
            UsageError: when more experts are pinned than some way has slots.
        """
        rows: list[RoutedRow] = []
        refused: dict[Holding, BudgetError] = {}
        ways = [(each, self._held(each)) for each in self.wanted.holdings]
        for holding, base in ways:
            try:
                rows.append(self._row(holding, base))
            except BudgetError as error:
                refused[holding] = error
        if not rows:
            raise _too_little(refused)
        return tuple(rows), [f"left out: {h.case}: {e.message}" for h, e in refused.items()]

    def _held(self, holding: Holding) -> OpenBase:
        wanted = self.wanted
        backend = held(self.base, holding, self.start, cap=wanted.cap, cold=wanted.cold)
        return replace(self.base, backend=backend)

    def _row(self, holding: Holding, base: OpenBase) -> RoutedRow:
        with _opened_by(self, base) as (model, read):
            course = _Course(model, self.wanted)
            for number in range(self.wanted.rounds):
                if number == min(1, self.wanted.rounds - 1):
                    course.begin()
                for text in self.texts:
                    with read(text) as reading:
                        course.follow(reading, text)
                    self.progress(1)
                course.end_round()
            return course.row(holding, memory=base.weight_bytes)


_Read = Callable[[_Text], AbstractContextManager[Reading]]


@contextmanager
def _opened_by(laboratory: _Laboratory, base: OpenBase) -> Iterator[tuple[Model, _Read]]:
    """Load a base in the memory that there is, and lend room for texts; nothing stays."""
    wanted = laboratory.wanted
    residents = Residents(
        laboratory.planner,
        Budget(laboratory.limit),
        ram=None if wanted.device == "cpu" else Budget(usual_budget()),
        progress=no_progress,
        tell=laboratory.tell,
        moe=UNKNOWN,
    )
    longest = max(len(text.ids) for text in laboratory.texts) + wanted.tokens
    buffers = base.buffer_bytes(longest)
    try:
        model = residents.hold_base(base, threads=laboratory.threads)

        @contextmanager
        def read(text: _Text) -> Iterator[Reading]:
            room = KVWanted(
                cache_key=None,
                identity=_NO_PLAN,
                config=base.config,
                ids=text.ids,
                virtual=0,
                capacity=len(text.ids) + wanted.tokens,
            )
            with residents.keeper(base.backend).borrow(room) as kv:
                model.prepare(kv.cache, BASE_ALONE, tokens=len(text.ids))
                yield model.reading(kv.cache, BASE_ALONE)

        with residents.tiers.holding(Tier.DEVICE, "buffers", buffers, what="buffers"):
            yield model, read
            model.rest()
    finally:
        residents.close()


class _Course:
    """What happens while texts are read and written, and what it took."""

    def __init__(self, model: Model, wanted: RoutedWanted) -> None:
        """Begin before the first text."""
        self._model, self._wanted = model, wanted
        self._moments: list[Moment] = []
        self._written, self._stretch = 0, _stretch(wanted)
        self._steps: list[tuple[float, ...]] = []
        self._now: list[float] = []
        self._prompts: list[tuple[int, float]] = []
        self._waited_reading = 0.0
        self._before = self._report()
        self._counted: Observed | None = None
        self._counted_from = 0
        self._look()

    def begin(self) -> None:
        """Let only what comes from now on count."""
        self._counted_from = self._written
        self._steps, self._now, self._prompts = [], [], []
        self._waited_reading = 0.0
        self._before = self._report()
        self._counted = self._observed()

    def follow(self, reading: Reading, text: _Text) -> None:
        """Read a text, and write what comes after it."""
        waited = self._waited()
        started = time.perf_counter()
        scores = reading.prefill(text.ids).logits
        self._prompts.append((len(text.ids), time.perf_counter() - started))
        self._waited_reading += self._waited() - waited
        for place in range(self._wanted.tokens):
            token = text.follows[place] if text.follows else int(scores.argmax())
            started = time.perf_counter()
            scores = reading.decode(token).logits
            self._now.append(time.perf_counter() - started)
            self._wrote()

    def end_round(self) -> None:
        """Put the steps of a round together."""
        self._steps.append(tuple(self._now))
        self._now = []

    def row(self, holding: Holding, *, memory: int) -> RoutedRow:
        """Return what counts."""
        if self._moments and self._moments[-1].tokens < self._written:
            self._look()
        return RoutedRow(
            holding=holding,
            steps=Series(tuple(self._steps)),
            prompts=tuple(self._prompts),
            report=self._report().since(self._before),
            layers=self._layers(),
            timeline=Timeline.of(self._moments),
            counted_from=self._counted_from,
            waited_reading_ms=self._waited_reading,
            memory=memory,
        )

    def _wrote(self) -> None:
        self._written += 1
        if self._written % self._stretch == 0:
            self._look()

    def _look(self) -> None:
        if (seen := self._observed()) is not None:
            self._moments.append(Moment(self._written, seen))

    def _report(self) -> RoutedReport:
        report = self._model.routed
        assert report is not None, "a base of routed experts"
        return report

    def _waited(self) -> float:
        """Return how many milliseconds were waited for experts so far."""
        return self._report().activity.waited_ms

    def _observed(self) -> Observed | None:
        """Return what was counted; None where all experts are there, and nothing can be missed."""
        counters = self._model.counters
        return None if counters is None or self._model.experts is None else counters.observed()

    def _layers(self) -> dict[int, LayerCounts]:
        now, before = self._observed(), self._counted
        if now is None or before is None:
            return {}
        return {number: found.since(before.layers[number]) for number, found in now.layers.items()}


def _stretch(wanted: RoutedWanted) -> int:
    """Return after how many tokens there is a new column of the picture."""
    total = wanted.tokens * wanted.rounds * max(len(wanted.prompts), 1)
    return max(LEAST, -(-total // STRETCHES))


_NO_PLAN = Digest.of(b"bench moe")
"""Nothing is kept under it."""
