"""The CPU decoder: the interface of `decoder.Decoder`, run as programs of compiled kernels.

Programs and workspaces are created when they are first needed. Adapter plans are not part of them,
so several plans may alternate or share a batch without new programs. Any thread may call the
decoder: one call, or one chunk of a prompt, runs at a time, and logits are copied out before the
next begins. Only the thread that processes a prompt may step other sequences in the middle of it,
between two layers and while its rows are scored; such steps have their own workspace and programs.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.decoder_program import (
    DecoderProgram,
    ExpertPrograms,
    ProgramStage,
    split_program_by_layer,
)
from expertctl.engine.cpu.packed_base import PackedBase
from expertctl.engine.cpu.program_cache import ProgramCache, ThreadTuner
from expertctl.engine.cpu.workspace import Workspace, group_rows_by_plan
from expertctl.engine.decoding import (
    PREFILL_CHUNK,
    DecodeResult,
    LayerTimer,
    PrefillResult,
    check_modules,
    check_soft_prompt,
    check_tokens,
)
from expertctl.engine.kernels.packed_format import PackedDeltas
from expertctl.engine.kernels.program import Program
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.routed_experts import RoutedExperts, make_resident_experts
from expertctl.engine.text.prompt import RecordLogits


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRow:
    """One more token of a sequence, with the plan of that sequence."""

    token: int
    cache: PagedKVCache
    deltas: PackedDeltas | None = None


class PackedDecoder:
    """Runs a packed base on a thread pool; the weights are only read."""

    def __init__(
        self,
        base: PackedBase,
        pool: ThreadPool,
        *,
        chunk: int = PREFILL_CHUNK,
        tuner: ThreadTuner | None = None,
        experts: RoutedExperts | None = None,
    ) -> None:
        """Run a base; a prompt is processed ``chunk`` tokens at a time.

        ``tuner`` chooses how many workers of the pool run; without it all do. ``experts`` owns the
        experts of routed layers; without it the base must have all of them.
        """
        self.config = base.config
        self.modules = frozenset(base.config.linear_shapes())
        self._base, self._pool, self._chunk, self._tuner = base, pool, chunk, tuner
        self._experts = experts or make_resident_experts(base)
        self._lock = threading.RLock()
        self._programs = ProgramCache(base, self._experts, chunk=chunk)
        self._interleaved_programs = ProgramCache(base, self._experts, chunk=chunk)
        """For steps in the middle of a prompt."""
        self._in_prefill = False
        self._times: LayerTimer | None = None
        block = base.config.block
        self._virtual_scale = np.float32(
            block.embedding_scale if block.scales_virtual_tokens else 1.0
        )

    def prefill(
        self,
        ids: Sequence[int],
        cache: PagedKVCache,
        deltas: PackedDeltas | None = None,
        *,
        soft_prompt: AnyArray | None = None,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        """Process a prompt; ``progress`` counts its tokens and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], precede the first token of a
        cache and count like tokens. Other sequences may run between two chunks. ``between_layers``
        may call `step` with other caches; it is never called for a base of routed experts.
        ``scores`` receives the logits of every position, at most as many rows at a time as a step
        scores; ``between_layers`` is called between these, too.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: if the cache is too small; nothing was processed then.
            IncompatibleError: for a token, a plan or a soft prompt that does not fit this base.
        """
        begin, started = cache.length, time.perf_counter()
        before, tokens = self._check_prompt(ids, cache, deltas, soft_prompt)
        read = len(before) + len(tokens)
        cache.ensure_capacity(read)
        logits = np.empty(self.config.vocab_size, np.float32)
        try:
            for start in range(0, read, self._chunk):
                end = min(start + self._chunk, read)
                with self._lock:
                    part = _PromptChunk(before, tokens, start, end)
                    wanted = logits if end == read else None
                    self._read_chunk(part, cache, deltas, wanted, scores, between_layers)
                progress(end - start)
        except BaseException:
            cache.rewind(begin)
            raise
        return PrefillResult(logits, read, _ms_since(started))

    def decode(
        self,
        token: int,
        cache: PagedKVCache,
        deltas: PackedDeltas | None = None,
        *,
        out: AnyArray | None = None,
    ) -> DecodeResult:
        """Process one more token; logits are written to ``out``, float32 [vocab], if given.

        Raises:
            BudgetError: if the cache is full.
            IncompatibleError: for a token or a plan that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        rows = None if out is None else out[None]
        logits = self.step([DecodeRow(token, cache, deltas)], out=rows)[0]
        return DecodeResult(logits, position, _ms_since(started))

    def step(self, rows: Sequence[DecodeRow], *, out: AnyArray | None = None) -> AnyArray:
        """Process one more token of each sequence; return logits, float32 [rows, vocab].

        They are written to ``out`` if given. The result of a row is the same, bit by bit, as if it
        were alone.

        Raises:
            BudgetError: if a cache is full; nothing was processed then.
            IncompatibleError: for a token or a plan that this base does not have.
        """
        for plan in {id(row.deltas): row.deltas for row in rows}.values():
            self._check_plan(plan)
        tokens = check_tokens([row.token for row in rows], self.config.vocab_size)
        assert len({id(row.cache) for row in rows}) == len(rows), "each sequence has its own cache"
        shape = (len(rows), self.config.vocab_size)
        assert out is None or out.shape == shape, f"scores are {shape}"
        for row in rows:
            row.cache.ensure_capacity(1)
        logits = np.empty(shape, np.float32) if out is None else out
        with self._lock:
            self._step(rows, tokens, logits)
        return logits

    @contextmanager
    def time_layers(self, times: LayerTimer) -> Iterator[None]:
        """Add the duration of each part of all passes within the context to ``times``.

        This includes passes of other threads. Meanwhile adapters run as separate operations, so
        that they are timed separately; that takes somewhat longer.
        """
        self._times = times
        try:
            yield
        finally:
            self._times = None

    def prepare(
        self,
        cache: PagedKVCache,
        deltas: PackedDeltas | None = None,
        *,
        tokens: int,
        rows: int = 1,
    ) -> None:
        """Create what a prompt of this many tokens, then steps of ``rows``, will need.

        Kernels that are not compiled yet are compiled here.
        """
        with self._lock:
            room = self._programs.get_workspace(tokens=min(tokens, self._chunk), rows=rows)
            for together in (True, False):
                self._get_program(room, [cache], [deltas], together=together)
            if rows > 1 and self._experts is None:
                room = self._interleaved_programs.get_workspace(tokens=rows, rows=rows)
                self._interleaved_programs.get_program(
                    room, [cache], [deltas], together=False, fused=self._times is None
                )

    def free_buffers(self) -> None:
        """Free everything except the weights."""
        with self._lock:
            self._programs.clear()
            self._interleaved_programs.clear()

    @property
    def has_no_buffers(self) -> bool:
        """Whether nothing but weights is allocated."""
        return self._programs.is_empty and self._interleaved_programs.is_empty

    @property
    def nbytes(self) -> int:
        """Bytes allocated on top of the weights."""
        return self._programs.nbytes + self._interleaved_programs.nbytes

    def _check_prompt(
        self,
        ids: Sequence[int],
        cache: PagedKVCache,
        deltas: PackedDeltas | None,
        soft_prompt: AnyArray | None,
    ) -> tuple[AnyArray, AnyArray]:
        """Return the soft prompt rows, [virtual tokens, hidden], and the tokens."""
        self._check_plan(deltas)
        tokens = check_tokens(ids, self.config.vocab_size)
        if soft_prompt is None:
            return np.empty((0, self.config.hidden_size), np.float32), tokens
        check_soft_prompt(soft_prompt, self.config.hidden_size, length=cache.length)
        return soft_prompt, tokens

    def _check_plan(self, deltas: PackedDeltas | None) -> None:
        if deltas is not None:
            check_modules(deltas.modules, self.modules)

    def _read_chunk(
        self,
        part: "_PromptChunk",
        cache: PagedKVCache,
        deltas: PackedDeltas | None,
        logits: AnyArray | None,
        scores: RecordLogits | None,
        between_layers: Callable[[], None] | None,
    ) -> None:
        """Process one chunk of a prompt; compute the logits of its last token if requested.

        The last layer writes the keys and values of all tokens. Without ``scores`` the rest of that
        layer runs for the last token only, because the results of the others are never read.
        """
        count, first = part.end - part.start, cache.length
        room = self._programs.get_workspace(tokens=count, rows=1)
        program = self._get_program(room, [cache], [deltas], together=True)
        room.reset_errors()
        virtual = part.fill(room.tokens)
        room.positions[:count] = np.arange(cache.length, cache.length + count)
        room.tables[:count] = cache.table
        program.set(count, group_rows_by_plan([deltas] * count))
        whole = nullcontext() if between_layers else self._tuned_workers(("prompt", count))
        with whole as workers:
            self._run(program.embed, workers)
            rows = room.hidden[: len(virtual), : virtual.shape[1]]
            rows[...] = virtual
            if self._virtual_scale != 1.0:
                rows *= self._virtual_scale
            if between_layers is None:
                self._run_stages(program.layers, room, count, workers)
            else:
                self._run_interleaved(program.layers, count, between_layers)
            left = count
            if scores is None:
                room.keep_row(count - 1, of=count)
                left = 1
                program.set(left, group_rows_by_plan([deltas]))
            self._run_stages(program.last, room, left, workers)
            self._finish_pass(room, count, phase=Phase.PROMPT)
        cache.advance(count)
        last = 0
        if scores is not None:
            last = self._score_all(
                program, room, deltas, first, count, scores, workers, between_layers
            )
        elif logits is not None:
            self._run(program.score, workers)
        if logits is not None:
            logits[...] = room.logits[last, : self.config.vocab_size]

    def _score_all(
        self,
        program: DecoderProgram,
        room: Workspace,
        deltas: PackedDeltas | None,
        first: int,
        count: int,
        scores: RecordLogits,
        workers: int | None,
        between: Callable[[], None] | None,
    ) -> int:
        """Pass the logits of ``count`` rows to ``scores``, as many at a time as fit the workspace.

        ``between`` may step other sequences in between. Returns the row of the workspace that has
        the logits of the last one.
        """
        rows = 0
        for begin in range(0, count, room.size[1]):
            if begin and between is not None:
                self._step_others(between)
            rows = min(room.size[1], count - begin)
            room.hidden[:rows] = room.hidden[begin : begin + rows]
            program.set(rows, group_rows_by_plan([deltas] * rows))
            self._run(program.score, workers)
            scores(first + begin, room.logits[:rows, : self.config.vocab_size])
        return rows - 1

    def _step(self, rows: Sequence[DecodeRow], tokens: AnyArray, logits: AnyArray) -> None:
        """Process a token of each row; rows are sorted so that those of one plan are adjacent."""
        programs = self._interleaved_programs if self._in_prefill else self._programs
        room = programs.get_workspace(tokens=len(rows), rows=len(rows))
        order = sorted(range(len(rows)), key=lambda number: id(rows[number].deltas))
        mine = [rows[number] for number in order]
        plans = [row.deltas for row in mine]
        caches, fused = [row.cache for row in mine], self._times is None
        program = programs.get_program(room, caches, plans, together=False, fused=fused)
        room.reset_errors()
        for place, (number, row) in enumerate(zip(order, mine, strict=True)):
            room.tokens[place], room.positions[place] = tokens[number], row.cache.length
            room.tables[place] = row.cache.table
        program.set(len(rows), group_rows_by_plan(plans))
        with self._tuned_workers(("step", len(rows))) as workers:
            self._run(program.embed, workers)
            self._run_stages(program.layers, room, len(rows), workers)
            self._finish_pass(room, len(rows), phase=Phase.DECODE)
            self._run(program.score, workers)
        for place, number in enumerate(order):
            logits[number] = room.logits[place, : self.config.vocab_size]
        for row in mine:
            row.cache.advance(1)

    def _run_interleaved(
        self, stages: Sequence[ProgramStage], count: int, between_layers: Callable[[], None]
    ) -> None:
        """Run stages layer by layer, and let other sequences step in between."""
        assert self._experts is None, "routed experts are loaded for one pass at a time"
        parts = [part for stage in stages for part in split_program_by_layer(stage.program)]
        for number, part in enumerate(parts):
            if number:
                self._step_others(between_layers)
            with self._tuned_workers(("layer", count)) as workers:
                self._run(part, workers)

    def _step_others(self, between: Callable[[], None]) -> None:
        """Let other sequences step within a prompt, in their own workspace and programs."""
        self._in_prefill = True
        try:
            between()
        finally:
            self._in_prefill = False

    def _run_stages(
        self, stages: Sequence[ProgramStage], room: Workspace, tokens: int, workers: int | None
    ) -> None:
        """Run stages; request the selected experts after each, as some may be missing."""
        for stage in stages:
            self._run(stage.program, workers)
            if stage.routed_layer is not None:
                assert self._experts is not None
                assert room.routed is not None
                waits = self._experts.request(
                    stage.routed_layer,
                    room.routed.choices,
                    tokens,
                    predicts_next=stage.predicts_next,
                )
                self._run_expert_lanes(stage.expert_programs, workers, waits=waits)

    def _finish_pass(self, room: Workspace, tokens: int, *, phase: Phase) -> None:
        """Notify the owner of routed experts that all layers have run."""
        if self._experts is not None and room.routed is not None:
            assert not room.routed.absent[0], "missing experts are not computed"
            self._experts.end_pass(room.routed.choices, tokens, phase=phase)

    def _run_expert_lanes(
        self, lanes: ExpertPrograms | None, workers: int | None, *, waits: bool
    ) -> None:
        """Compute the selected experts: those in memory while the others are loaded."""
        assert self._experts is not None
        if lanes is not None:
            self._run(lanes.loaded if waits else lanes.all_experts, workers)
        if not waits:
            return
        while self._experts.wait_for_some():
            if lanes is not None:
                self._run(lanes.arrived, workers)
        if lanes is not None:
            self._run(lanes.remaining, workers)

    def _run(self, program: Program, workers: int | None) -> None:
        if self._times is None:
            self._pool.run(program, workers=workers)
            return
        spent = self._pool.run_timed(program, workers=workers)
        self._times.add_all(program.places, program.names, spent)

    def _tuned_workers(self, kind: Hashable) -> AbstractContextManager[int | None]:
        return nullcontext() if self._tuner is None else self._tuner.measure_step(kind)

    def _get_program(
        self,
        room: Workspace,
        caches: Sequence[PagedKVCache],
        plans: Sequence[PackedDeltas | None],
        *,
        together: bool,
    ) -> DecoderProgram:
        fused = self._times is None
        return self._programs.get_program(room, caches, plans, together=together, fused=fused)


@dataclass(frozen=True, slots=True, eq=False)
class _PromptChunk:
    """Rows ``start`` to ``end`` of [soft prompt, tokens]."""

    soft_prompt_rows: AnyArray
    tokens: AnyArray
    start: int
    end: int

    def fill(self, tokens: AnyArray) -> AnyArray:
        """Write its tokens, with 0 for soft prompt rows; return those rows."""
        virtual, count = len(self.soft_prompt_rows), self.end - self.start
        first = max(min(virtual, self.end) - self.start, 0)
        tokens[:first] = 0
        tokens[first:count] = self.tokens[max(self.start - virtual, 0) : max(self.end - virtual, 0)]
        return self.soft_prompt_rows[self.start : self.start + first]


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
