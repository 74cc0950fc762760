"""The decoder of CPUs: the calls of `decoder.Decoder`, run as programs of compiled kernels.

Programs and the room they compute in are made when they are first needed; plans are no part of
them, so several may take turns or meet in one batch, and nothing is made anew for it. Any number of
threads may call it: one call, or one stretch of a prompt, runs at a time, and scores are copied out
before the next begins. Only the thread that reads a prompt may step other texts in the middle of
it, between two layers and while its rows are scored; such steps have a room and programs of their
own.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.batch_counts import stretches_of
from expertctl.engine.decoder import PREFILL_CHUNK, DecodeResult, PrefillResult
from expertctl.engine.decoder_inputs import check_modules, check_soft_prompt, checked_tokens
from expertctl.engine.decoder_program import DecoderProgram, Lanes, Stage, split_by_layer
from expertctl.engine.decoder_programs import DecoderPrograms
from expertctl.engine.decoder_room import DecoderRoom
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.program import Program
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routed_experts import RoutedExperts
from expertctl.engine.moe.whole_experts import whole_experts
from expertctl.engine.pace import Pace
from expertctl.engine.packed_base import PackedBase
from expertctl.engine.packed_delta import PackedDeltas
from expertctl.engine.prompt_scores import ScoreRows

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """One more token of one text, with the plan of that text."""

    token: int
    cache: KVPages
    deltas: PackedDeltas | None = None


class PackedDecoder:
    """A packed base that can be run by a crew; its weights are only read."""

    def __init__(
        self,
        base: PackedBase,
        crew: Crew,
        *,
        chunk: int = PREFILL_CHUNK,
        pace: Pace | None = None,
        experts: RoutedExperts | None = None,
    ) -> None:
        """Run a base; a prompt is read ``chunk`` tokens at a time.

        ``pace`` says how many of the crew work; without it all do. ``experts`` owns those of
        routed layers; without it they are those of the base, which then has all.
        """
        self.config = base.config
        self.device = torch.device("cpu")
        self.modules = frozenset(base.config.linear_shapes())
        self._base, self._crew, self._chunk, self._pace = base, crew, chunk, pace
        self._experts = experts or whole_experts(base)
        self._lock = threading.RLock()
        self._programs = DecoderPrograms(base, self._experts, chunk=chunk)
        self._interleaved = DecoderPrograms(base, self._experts, chunk=chunk)
        """What steps in the middle of a prompt are computed with."""
        self._is_inside_prefill = False
        self._times: LayerTimes | None = None

    def prefill(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVPages,
        deltas: PackedDeltas | None = None,
        *,
        soft_prompt: Tensor | None = None,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        """Read a prompt; ``progress`` counts its tokens and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], stand before the first token
        of a cache and count like tokens. Other texts may be read between two stretches.
        ``between_layers`` may call `step` with other caches; a base of routed experts has none.
        ``scores`` gets the logits of every position, as many rows at a time as a step scores at
        most; ``between_layers`` is called between these, too.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token, a plan or a soft prompt that does not fit this base.
        """
        begin, started = cache.length, time.perf_counter()
        before, tokens = self._checked(ids, cache, deltas, soft_prompt)
        read = len(before) + len(tokens)
        cache.require(read)
        logits = torch.empty(self.config.vocab_size)
        try:
            for start in range(0, read, self._chunk):
                end = min(start + self._chunk, read)
                with self._lock:
                    part = _Part(before, tokens, start, end)
                    wanted = logits if end == read else None
                    self._read(part, cache, deltas, wanted, scores, between_layers)
                progress(end - start)
        except BaseException:
            cache.rewind(begin)
            raise
        return PrefillResult(logits, read, _ms_since(started))

    def decode(
        self,
        token: int,
        cache: KVPages,
        deltas: PackedDeltas | None = None,
        *,
        out: Tensor | None = None,
    ) -> DecodeResult:
        """Read one more token; with ``out``, float32 [vocab], scores are written there.

        Raises:
            BudgetError: when the cache is full.
            IncompatibleError: for a token or a plan that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        rows = None if out is None else out[None]
        logits = self.step([StepRow(token, cache, deltas)], out=rows)[0]
        return DecodeResult(logits, position, _ms_since(started))

    def step(self, rows: Sequence[StepRow], *, out: Tensor | None = None) -> Tensor:
        """Read one more token of each of several texts; return scores, float32 [rows, vocab].

        They are written to ``out`` where it is given. What a row gets is the same, bit by bit, as
        if it were alone.

        Raises:
            BudgetError: when a cache is full; nothing was read then.
            IncompatibleError: for a token or a plan that this base does not have.
        """
        for plan in {id(row.deltas): row.deltas for row in rows}.values():
            self._check_plan(plan)
        tokens = checked_tokens([row.token for row in rows], self.config.vocab_size).numpy()
        assert len({id(row.cache) for row in rows}) == len(rows), "each text has its own cache"
        shape = (len(rows), self.config.vocab_size)
        assert out is None or tuple(out.shape) == shape, f"scores are {shape}"
        for row in rows:
            row.cache.require(1)
        logits = torch.empty(shape) if out is None else out
        with self._lock:
            self._step(rows, tokens, logits.numpy())
        return logits

    @contextmanager
    def timed(self, times: LayerTimes) -> Iterator[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes, in any thread.

        What plans add is in operations of its own meanwhile, so that its time is known; that takes
        somewhat longer.
        """
        self._times = times
        try:
            yield
        finally:
            self._times = None

    def prepare(
        self,
        cache: KVPages,
        deltas: PackedDeltas | None = None,
        *,
        tokens: int,
        rows: int = 1,
    ) -> None:
        """Make beforehand what reading a prompt of so many tokens, then steps of ``rows``, needs.

        Kernels that are not compiled yet are compiled here.
        """
        with self._lock:
            room = self._programs.room(tokens=min(tokens, self._chunk), rows=rows)
            for together in (True, False):
                self._program(room, [cache], [deltas], together=together)
            if rows > 1 and self._experts is None:
                room = self._interleaved.room(tokens=rows, rows=rows)
                self._interleaved.program(
                    room, [cache], [deltas], together=False, fused=self._times is None
                )

    def rest(self) -> None:
        """Let go of all but the weights."""
        with self._lock:
            self._programs.let_go()
            self._interleaved.let_go()

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._programs.is_empty and self._interleaved.is_empty

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds beside its weights."""
        return self._programs.nbytes + self._interleaved.nbytes

    def _checked(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVPages,
        deltas: PackedDeltas | None,
        soft_prompt: Tensor | None,
    ) -> tuple[Numbers, Numbers]:
        """Return the rows before the first token, [virtual tokens, hidden], and the tokens."""
        self._check_plan(deltas)
        tokens = checked_tokens(ids, self.config.vocab_size).numpy()
        if soft_prompt is None:
            return np.empty((0, self.config.hidden_size), np.float32), tokens
        check_soft_prompt(soft_prompt, self.config.hidden_size, length=cache.length)
        return soft_prompt.float().numpy(), tokens

    def _check_plan(self, deltas: PackedDeltas | None) -> None:
        if deltas is not None:
            check_modules(deltas.modules, self.modules)

    def _read(
        self,
        part: "_Part",
        cache: KVPages,
        deltas: PackedDeltas | None,
        logits: Tensor | None,
        scores: ScoreRows | None,
        between_layers: Callable[[], None] | None,
    ) -> None:
        """Read one stretch of a prompt; score its last token where that is wanted.

        The last layer writes the keys and values of all tokens. Without ``scores`` the rest of it
        is for the last one alone, since what it would make of the others is never read.
        """
        count, first = part.end - part.start, cache.length
        room = self._programs.room(tokens=count, rows=1)
        program = self._program(room, [cache], [deltas], together=True)
        room.begin_pass()
        virtual = part.fill(room.tokens)
        room.positions[:count] = np.arange(cache.length, cache.length + count)
        room.tables[:count] = cache.table
        program.set(count, stretches_of([deltas] * count))
        whole = nullcontext() if between_layers else self._workers(("prompt", count))
        with whole as workers:
            self._run(program.embed, workers)
            room.hidden[: len(virtual), : virtual.shape[1]] = virtual
            if between_layers is None:
                self._run_stages(program.layers, room, count, workers)
            else:
                self._run_interleaved(program.layers, count, between_layers)
            left = count
            if scores is None:
                room.keep_row(count - 1, of=count)
                left = 1
                program.set(left, stretches_of([deltas]))
            self._run_stages(program.last, room, left, workers)
            self._passed(room, count, phase=Phase.PROMPT)
        cache.advance(count)
        last = 0
        if scores is not None:
            last = self._score_all(
                program, room, deltas, first, count, scores, workers, between_layers
            )
        elif logits is not None:
            self._run(program.score, workers)
        if logits is not None:
            logits.numpy()[...] = room.logits[last, : self.config.vocab_size]

    def _score_all(
        self,
        program: DecoderProgram,
        room: DecoderRoom,
        deltas: PackedDeltas | None,
        first: int,
        count: int,
        scores: ScoreRows,
        workers: int | None,
        between: Callable[[], None] | None,
    ) -> int:
        """Give the logits of ``count`` rows, as many at a time as the room scores.

        ``between`` may step other texts between two of these times. Returns the row of the room
        that has the logits of the last.
        """
        rows = 0
        for begin in range(0, count, room.size[1]):
            if begin and between is not None:
                self._step_others(between)
            rows = min(room.size[1], count - begin)
            room.hidden[:rows] = room.hidden[begin : begin + rows]
            program.set(rows, stretches_of([deltas] * rows))
            self._run(program.score, workers)
            scores(first + begin, room.logits[:rows, : self.config.vocab_size])
        return rows - 1

    def _step(self, rows: Sequence[StepRow], tokens: Numbers, logits: Numbers) -> None:
        """Read a token of each row; rows of one plan are adjacent."""
        programs = self._interleaved if self._is_inside_prefill else self._programs
        room = programs.room(tokens=len(rows), rows=len(rows))
        order = sorted(range(len(rows)), key=lambda number: id(rows[number].deltas))
        mine = [rows[number] for number in order]
        plans = [row.deltas for row in mine]
        caches, fused = [row.cache for row in mine], self._times is None
        program = programs.program(room, caches, plans, together=False, fused=fused)
        room.begin_pass()
        for place, (number, row) in enumerate(zip(order, mine, strict=True)):
            room.tokens[place], room.positions[place] = tokens[number], row.cache.length
            room.tables[place] = row.cache.table
        program.set(len(rows), stretches_of(plans))
        with self._workers(("step", len(rows))) as workers:
            self._run(program.embed, workers)
            self._run_stages(program.layers, room, len(rows), workers)
            self._passed(room, len(rows), phase=Phase.DECODE)
            self._run(program.score, workers)
        for place, number in enumerate(order):
            logits[number] = room.logits[place, : self.config.vocab_size]
        for row in mine:
            row.cache.advance(1)

    def _run_interleaved(
        self, stages: Sequence[Stage], count: int, between_layers: Callable[[], None]
    ) -> None:
        """Run stages layer by layer, and let others step in between."""
        assert self._experts is None, "routed experts are brought for one pass at a time"
        parts = [part for stage in stages for part in split_by_layer(stage.program)]
        for number, part in enumerate(parts):
            if number:
                self._step_others(between_layers)
            with self._workers(("layer", count)) as workers:
                self._run(part, workers)

    def _step_others(self, between: Callable[[], None]) -> None:
        """Let others step in the middle of a prompt, in the room and programs that are theirs."""
        self._is_inside_prefill = True
        try:
            between()
        finally:
            self._is_inside_prefill = False

    def _run_stages(
        self, stages: Sequence[Stage], room: DecoderRoom, tokens: int, workers: int | None
    ) -> None:
        """Run some stages; have the chosen experts brought, where some may be missing."""
        for stage in stages:
            self._run(stage.program, workers)
            if stage.chosen is not None:
                assert self._experts is not None
                assert room.routed is not None
                waits = self._experts.ask(
                    stage.chosen, room.routed, tokens, foresees=stage.foresees
                )
                self._run_lanes(stage.lanes, workers, waits=waits)

    def _passed(self, room: DecoderRoom, tokens: int, *, phase: Phase) -> None:
        """Tell the owner of routed experts that all layers were run."""
        if self._experts is not None and room.routed is not None:
            assert not room.routed.absent[0], "no missing expert is computed"
            self._experts.passed(room.routed, tokens, phase=phase)

    def _run_lanes(self, lanes: Lanes | None, workers: int | None, *, waits: bool) -> None:
        """Compute chosen experts: those that are there while others are being read."""
        assert self._experts is not None
        if lanes is not None:
            self._run(lanes.there if waits else lanes.whole, workers)
        if not waits:
            return
        while self._experts.wait_for_some():
            if lanes is not None:
                self._run(lanes.more, workers)
        if lanes is not None:
            self._run(lanes.rest, workers)

    def _run(self, program: Program, workers: int | None) -> None:
        if self._times is None:
            self._crew.run(program, workers=workers)
            return
        spent = self._crew.timed(program, workers=workers)
        self._times.add_all(program.places, program.names, spent)

    def _workers(self, kind: Hashable) -> AbstractContextManager[int | None]:
        return nullcontext() if self._pace is None else self._pace.step(kind)

    def _program(
        self,
        room: DecoderRoom,
        caches: Sequence[KVPages],
        plans: Sequence[PackedDeltas | None],
        *,
        together: bool,
    ) -> DecoderProgram:
        fused = self._times is None
        return self._programs.program(room, caches, plans, together=together, fused=fused)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows ``start`` to ``end`` of [soft prompt, tokens]."""

    before: Numbers
    tokens: Numbers
    start: int
    end: int

    def fill(self, tokens: Numbers) -> Numbers:
        """Write its tokens, 0 where a row of the soft prompt stands; return those rows."""
        virtual, count = len(self.before), self.end - self.start
        first = max(min(virtual, self.end) - self.start, 0)
        tokens[:first] = 0
        tokens[first:count] = self.tokens[max(self.start - virtual, 0) : max(self.end - virtual, 0)]
        return self.before[self.start : self.start + first]


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
