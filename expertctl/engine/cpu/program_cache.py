"""The programs and workspace of a decoder, their memory estimate, and the tuning of thread counts.

`ProgramCache` creates programs when they are needed. Their maximum size follows from the
configuration, so it is known before any weight is read.

`ThreadTuner` chooses the number of workers of a step from measured durations, because other
processes compete for the same cores. Now and then a few steps try another number, the nearest
first; it is kept if it was faster. After a trial that lost, the next one waits until the loss is
small compared with the steps in between; steps that suddenly take long start a trial at once. Which
worker computes an item never changes a result (`kernels.thread_pool`), so neither does the number
of workers.
"""

import time
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from expertctl.engine.cpu.decoder_program import (
    DecoderProgram,
    build_decoder_program,
    estimate_program_bytes,
)
from expertctl.engine.cpu.packed_base import PackedBase
from expertctl.engine.cpu.workspace import (
    ProgramVariant,
    Workspace,
    choose_variant,
    estimate_base_workspace_bytes,
    estimate_factor_bytes,
    estimate_plan_bytes,
)
from expertctl.engine.decoding import PREFILL_CHUNK
from expertctl.engine.kernels.packed_format import PackedDeltas, Scheme
from expertctl.engine.kv.block_pool import InterleavedPages, PagedKVCache
from expertctl.engine.moe.routed_experts import RoutedExperts
from expertctl.package.model_config import ModelConfig

RECENT_STEPS, TRIAL_STEPS = 8, 3
"""Steps by which the current number of workers and the tried one are judged."""
MIN_TRIAL_INTERVAL, MAX_TRIAL_INTERVAL = 16, 512
"""Minimum and maximum number of steps between two trials."""
COST = 0.02
"""Maximum cost of lost trials, as a fraction of the time of the steps between them."""
GAIN = 0.95
"""A number of workers is adopted if its steps take less than this fraction of the current time."""
WALL = 1.2
"""If steps take this many times as long, numbers farther away are not tried."""
ALARM = 1.5
"""Steps that take this many times as long as usual cause a trial."""
MIN_SLOW_STEPS = 2
"""The number of slow steps in a row that is needed; a single one is noise."""
_CREEP = 1.02
"""The factor by which the usual time may grow per step, as sequences get longer."""


class ThreadTuner:
    """The number of workers of one thread pool, for each kind of step."""

    def __init__(self, limit: int) -> None:
        """Choose between one worker and ``limit``."""
        self.limit = max(limit, 1)
        self._tuners: dict[Hashable, StepTuner] = {}

    @contextmanager
    def measure_step(self, kind: Hashable) -> Iterator[int]:
        """Yield the workers for one step, and measure it; steps of a kind do equal work."""
        tuner = self._tuners.setdefault(kind, StepTuner(self.limit))
        workers, started = tuner.workers, time.perf_counter()
        yield workers
        tuner.record(workers, time.perf_counter() - started)


class StepTuner:
    """The measurements of one kind of step."""

    def __init__(self, limit: int) -> None:
        """Start with the maximum number of workers."""
        self._counts = list_worker_counts(limit)
        self._chosen = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._usual, self._loud = 0.0, 0
        self._tried: int | None = None
        self._trial: list[float] = []
        self._lost: set[int] = set()
        self._left = MIN_TRIAL_INTERVAL

    @property
    def workers(self) -> int:
        """The number of workers for the next step."""
        return self._counts[self._chosen if self._tried is None else self._tried]

    def record(self, workers: int, seconds: float) -> None:
        """Record the duration of a step; one that began before the last change is ignored."""
        if workers != self.workers or len(self._counts) == 1:
            return
        if self._tried is None:
            self._detect_slowdown(seconds)
        else:
            self._trial.append(seconds)
            self._judge_trial(self._tried)

    def _detect_slowdown(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._left -= 1
        typical = self._usual or seconds
        self._loud = self._loud + 1 if seconds > ALARM * typical else 0
        if self._loud == MIN_SLOW_STEPS:
            self._reset_baseline()
        elif self._loud == 0:
            self._usual = min(typical * _CREEP, max(seconds, typical / _CREEP))
        if self._left <= 0:
            self._start_trial()

    def _reset_baseline(self) -> None:
        """Judge only by the steps after the change, which are the new baseline."""
        self._recent = deque(list(self._recent)[-MIN_SLOW_STEPS:], maxlen=RECENT_STEPS)
        self._usual, self._loud = min(self._recent), 0
        self._lost.clear()
        self._left = 0

    def _start_trial(self) -> None:
        places = set(range(len(self._counts))) - {self._chosen}
        if self._lost >= places:
            self._lost.clear()
        self._tried = min(places - self._lost, key=lambda place: abs(place - self._chosen))
        self._trial = []

    def _judge_trial(self, tried: int) -> None:
        present = median(self._recent)
        hopeless = self._trial[-1] > 2 * present
        if len(self._trial) < TRIAL_STEPS and not hopeless:
            return
        if not hopeless and median(self._trial) < GAIN * present:
            self._adopt(tried)
        else:
            self._reject(tried, present)
        self._tried = None

    def _adopt(self, tried: int) -> None:
        self._chosen, self._usual = tried, median(self._trial)
        self._recent = deque(self._trial, maxlen=RECENT_STEPS)
        self._lost.clear()
        self._left = MIN_TRIAL_INTERVAL

    def _reject(self, tried: int, present: float) -> None:
        beyond = range(tried + 1, len(self._counts)) if tried > self._chosen else range(tried)
        self._lost.add(tried)
        if max(self._trial) > WALL * present:
            self._lost.update(beyond)
        self._left = _compute_trial_interval(sum(self._trial) / present - len(self._trial))


def _compute_trial_interval(lost: float) -> int:
    """Return the steps until the next trial after one that lost the time of ``lost`` steps."""
    return int(min(max(lost / COST, MIN_TRIAL_INTERVAL), MAX_TRIAL_INTERVAL))


def list_worker_counts(limit: int) -> tuple[int, ...]:
    """Return the candidate numbers of workers: all, all but one, and repeated halves of all."""
    counts = {limit, max(limit - 1, 1)}
    while limit > 1:
        limit //= 2
        counts.add(limit)
    return tuple(sorted(counts, reverse=True))


MAX_PROGRAMS = 4
"""Programs kept, the most recently used: prompts and steps with two kinds of plans.

Or, while layers are timed, with one kind, both separate and fused.
"""
ADAPTER_SCHEMES = (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16, Scheme.INT8)
"""The schemes that plans may be stored in."""


class ProgramCache:
    """Owns everything a decoder allocates on top of its weights; used by one thread at a time."""

    def __init__(self, base: PackedBase, experts: RoutedExperts | None, *, chunk: int) -> None:
        """Start empty; prompts are processed ``chunk`` tokens at a time."""
        self._base, self._experts, self._chunk = base, experts, chunk
        self._room: Workspace | None = None
        self._programs: dict[ProgramVariant, DecoderProgram] = {}

    def __len__(self) -> int:
        """Return the number of programs."""
        return len(self._programs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated."""
        return self._room is None

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace and the programs."""
        if self._room is None:
            return 0
        return self._room.nbytes + sum(self._estimate_bytes(each) for each in self._programs)

    def clear(self) -> None:
        """Free the workspace and the programs."""
        self._room, self._programs = None, {}

    def get_workspace(self, *, tokens: int, rows: int) -> Workspace:
        """Return a workspace that is large enough; one that is too small is freed first."""
        held = (0, 0) if self._room is None else self._room.size
        wanted = _round_up_size(tokens=tokens, rows=rows, chunk=self._chunk)
        size = (max(held[0], wanted[0]), max(held[1], wanted[1]))
        if self._room is None or size != held:
            self.clear()
            base = self._base
            self._room = Workspace(base.config, base.scheme, tokens=size[0], rows=size[1])
        return self._room

    def get_program(
        self,
        workspace: Workspace,
        caches: Sequence[PagedKVCache],
        plans: Sequence[PackedDeltas | None],
        *,
        together: bool,
        fused: bool,
    ) -> DecoderProgram:
        """Return the program for sequences with these caches and plans in a workspace.

        ``together``: consecutive tokens of one sequence; ``fused`` as in `ProgramVariant`.
        """
        numbers = _get_page_scheme(caches)
        there = [plan for plan in plans if plan is not None]
        wanted = choose_variant(single_sequence=together, numbers=numbers, plans=there, fused=fused)
        program = self._programs.pop(wanted, None)
        if program is None:
            while len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = build_decoder_program(self._base, workspace, wanted, self._experts)
        self._programs[wanted] = program
        return program

    def _estimate_bytes(self, wanted: ProgramVariant) -> int:
        cached = self._experts is not None and not self._experts.is_whole
        return estimate_program_bytes(
            self._base.config,
            schemes=len(wanted.adapters),
            scales=wanted.scales,
            routed=len(wanted.routed),
            lanes=cached,
        )


def estimate_buffer_bytes(
    config: ModelConfig,
    scheme: Scheme,
    *,
    tokens: int = PREFILL_CHUNK,
    chunk: int = PREFILL_CHUNK,
    rows: int = 1,
    width: int = 0,
    adapters: Collection[Scheme] | None = None,
) -> int:
    """Return the maximum bytes that a decoder allocates on top of its weights.

    Prompts have up to ``tokens``, of which ``chunk`` are processed at a time, and a step has up to
    ``rows`` sequences; several rows may also step between two layers of a prompt, in a workspace of
    their own. Plans are up to ``width`` wide, those of one batch in the schemes ``adapters``; None:
    all in any one scheme. Plans that only scale have no width.
    """
    size = _round_up_size(tokens=min(tokens, chunk), rows=rows, chunk=chunk)
    sizes = [size]
    if rows > 1 and config.experts is None:
        sizes.append(_round_up_size(tokens=rows, rows=rows, chunk=chunk))
    return sum(
        _estimate_workspace_bytes(config, scheme, size, width=width, rows=rows, adapters=adapters)
        for size in sizes
    )


def _estimate_workspace_bytes(
    config: ModelConfig,
    scheme: Scheme,
    size: tuple[int, int],
    *,
    width: int,
    rows: int,
    adapters: Collection[Scheme] | None,
) -> int:
    """Return the bytes of a workspace with its programs and the additions of plans."""
    own = estimate_base_workspace_bytes(config, scheme, tokens=size[0], rows=size[1])
    each = {
        s: estimate_plan_bytes(config, scheme, s, tokens=size[0], width=width)
        for s in ADAPTER_SCHEMES
    }
    if adapters is None:
        adapters = [max(each, key=lambda s: each[s])] if width else []
    factors = estimate_factor_bytes(config, tokens=size[0], schemes=len(ADAPTER_SCHEMES))
    plans = factors + sum(each[s] for s in set(adapters))
    routed = len(ADAPTER_SCHEMES) if rows > 1 else 1
    program = estimate_program_bytes(
        config, schemes=len(set(adapters)), scales=True, routed=routed, lanes=True
    )
    return own + plans + MAX_PROGRAMS * program


def _round_up_size(*, tokens: int, rows: int, chunk: int) -> tuple[int, int]:
    """Return powers of two, so that workspaces seldom grow; at most ``chunk`` tokens."""
    scored = 1 << (rows - 1).bit_length()
    wanted = 1 << (tokens - 1).bit_length()
    return max(wanted if tokens > chunk else min(wanted, chunk), scored), scored


def _get_page_scheme(caches: Sequence[PagedKVCache]) -> Scheme:
    """Return the scheme of the pages of all caches."""
    layout = caches[0].layout
    assert isinstance(layout, InterleavedPages), "kernels read no other pages"
    assert all(cache.layout == layout for cache in caches), "all KV pages have one scheme"
    return layout.numbers
