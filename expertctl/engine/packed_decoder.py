"""The decoder of CPUs: the calls of `decoder.Decoder`, run as programs of compiled kernels.

Programs and the room they compute in are made when they are first needed; plans are no part of
them, so several may take turns or meet in one batch, and nothing is made anew for it. Any number of
threads may call it: one call, or one stretch of a prompt, runs at a time, and scores are copied out
before the next begins.
"""

import threading
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.batch_counts import Stretch
from expertctl.engine.decoder import PREFILL_CHUNK, DecodeResult, PrefillResult
from expertctl.engine.decoder_inputs import check_modules, check_soft_prompt, checked_tokens
from expertctl.engine.decoder_program import (
    DecoderProgram,
    Variant,
    decoder_program,
    program_bytes,
    variant,
)
from expertctl.engine.decoder_room import DecoderRoom, factor_bytes, plan_bytes, room_bytes
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.program import Program
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routed_experts import RoutedExperts, WholeExperts
from expertctl.engine.pace import Pace
from expertctl.engine.packed_base import PackedBase, expert_shape
from expertctl.engine.packed_delta import PackedDeltas
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
PROGRAMS = 4
"""How many programs are kept, those used last: prompts and steps with two kinds of plans.

Or, while layers are timed, with one kind in operations of its own and fused.
"""
ADAPTERS = (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16, Scheme.INT8)
"""What plans may be stored in."""


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

        ``pace`` says how many of the crew work; without one it is all of them. ``experts`` owns
        those of routed layers; without it they are those of the base, which has all then.
        """
        self.config = base.config
        self.device = torch.device("cpu")
        self.modules = frozenset(base.config.linear_shapes())
        self._base, self._crew, self._chunk, self._pace = base, crew, chunk, pace
        self._experts = experts or _whole(base)
        self._lock = threading.Lock()
        self._room: DecoderRoom | None = None
        self._programs: dict[Variant, DecoderProgram] = {}
        self._times: LayerTimes | None = None

    def prefill(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVPages,
        deltas: PackedDeltas | None = None,
        *,
        soft_prompt: Tensor | None = None,
        progress: Progress = no_progress,
    ) -> PrefillResult:
        """Read a prompt; ``progress`` counts its tokens and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], stand before the first token
        of a cache and count like tokens. Other texts may be read between two stretches.

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
                    self._read(part, cache, deltas, logits if end == read else None)
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
        """Add to ``times`` how long each part of what is read meanwhile takes, whoever reads it.

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
        """Make beforehand what a prompt of so many tokens, and then rows of one, are read with.

        Whatever of it is not compiled yet is compiled here.
        """
        with self._lock:
            room = self._prepared_room(tokens=min(tokens, self._chunk), rows=rows)
            for together in (True, False):
                self._program(room, [cache], [deltas], together=together)

    def rest(self) -> None:
        """Let go of all but the weights."""
        with self._lock:
            self._room, self._programs = None, {}

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._room is None

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds beside its weights."""
        if self._room is None:
            return 0
        programs = (
            program_bytes(
                self.config, schemes=len(v.adapters), scales=v.scales, routed=len(v.routed)
            )
            for v in self._programs
        )
        return self._room.nbytes + sum(programs)

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
    ) -> None:
        """Read one stretch of a prompt; score its last token where that is wanted."""
        count = part.end - part.start
        room = self._prepared_room(tokens=count, rows=1)
        program = self._program(room, [cache], [deltas], together=True)
        virtual = part.fill(room.tokens)
        room.positions[:count] = np.arange(cache.length, cache.length + count)
        room.tables[:count] = cache.table
        program.set(count, _stretches([deltas] * count))
        with self._workers(("prompt", count)) as workers:
            self._run(program.embed, workers)
            room.hidden[: len(virtual), : virtual.shape[1]] = virtual
            self._run_layers(program, room, count, workers, phase=Phase.PROMPT)
        cache.advance(count)
        if logits is not None:
            room.hidden[0] = room.hidden[count - 1]
            program.set(1, _stretches([deltas]))
            self._run(program.score, workers)
            logits.numpy()[...] = room.logits[0, : self.config.vocab_size]

    def _step(self, rows: Sequence[StepRow], tokens: Numbers, logits: Numbers) -> None:
        """Read tokens with rows of one plan beside each other."""
        room = self._prepared_room(tokens=len(rows), rows=len(rows))
        order = sorted(range(len(rows)), key=lambda number: id(rows[number].deltas))
        mine = [rows[number] for number in order]
        plans = [row.deltas for row in mine]
        program = self._program(room, [row.cache for row in mine], plans, together=False)
        for place, (number, row) in enumerate(zip(order, mine, strict=True)):
            room.tokens[place], room.positions[place] = tokens[number], row.cache.length
            room.tables[place] = row.cache.table
        program.set(len(rows), _stretches(plans))
        with self._workers(("step", len(rows))) as workers:
            self._run(program.embed, workers)
            self._run_layers(program, room, len(rows), workers, phase=Phase.DECODE)
            self._run(program.score, workers)
        for place, number in enumerate(order):
            logits[number] = room.logits[place, : self.config.vocab_size]
        for row in mine:
            row.cache.advance(1)

    def _run_layers(
        self,
        program: DecoderProgram,
        room: DecoderRoom,
        tokens: int,
        workers: int | None,
        *,
        phase: Phase,
    ) -> None:
        """Run all layers; where experts may be missing, have them brought when they are chosen."""
        for stage in program.layers:
            self._run(stage.program, workers)
            if stage.chosen is not None:
                assert self._experts is not None
                assert room.routed is not None
                self._experts.bring(stage.chosen, room.routed, tokens)
        if self._experts is not None and room.routed is not None:
            self._experts.passed(room.routed, tokens, phase=phase)

    def _run(self, program: Program, workers: int | None) -> None:
        if self._times is None:
            self._crew.run(program, workers=workers)
            return
        spent = self._crew.timed(program, workers=workers)
        self._times.add_all(program.places, program.names, spent)

    def _workers(self, kind: Hashable) -> AbstractContextManager[int | None]:
        return nullcontext() if self._pace is None else self._pace.step(kind)

    def _prepared_room(self, *, tokens: int, rows: int) -> DecoderRoom:
        """Return a room that is large enough; what was is let go of before."""
        held = (0, 0) if self._room is None else self._room.size
        wanted = _room_size(tokens=tokens, rows=rows, chunk=self._chunk)
        size = (max(held[0], wanted[0]), max(held[1], wanted[1]))
        if self._room is None or size != held:
            self._room, self._programs = None, {}
            self._room = DecoderRoom(self.config, self._base.scheme, tokens=size[0], rows=size[1])
        return self._room

    def _program(
        self,
        room: DecoderRoom,
        caches: Sequence[KVPages],
        plans: Sequence[PackedDeltas | None],
        *,
        together: bool,
    ) -> DecoderProgram:
        numbers = caches[0].numbers
        assert all(cache.numbers is numbers for cache in caches), "pages of one kind"
        there = [plan for plan in plans if plan is not None]
        fused = self._times is None
        wanted = variant(together=together, numbers=numbers, plans=there, fused=fused)
        program = self._programs.pop(wanted, None)
        if program is None:
            while len(self._programs) >= PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = decoder_program(self._base, room, wanted, self._experts)
        self._programs[wanted] = program
        return program


def buffer_bytes(
    config: ModelConfig,
    scheme: Scheme,
    *,
    tokens: int = PREFILL_CHUNK,
    chunk: int = PREFILL_CHUNK,
    rows: int = 1,
    width: int = 0,
    adapters: Collection[Scheme] | None = None,
) -> int:
    """Return the bytes that a decoder holds beside its weights at most, known before they are read.

    Prompts have up to ``tokens``, of which ``chunk`` are read at a time, and up to ``rows`` texts
    are read in one step. Plans are up to ``width`` wide, those of one batch in ``adapters``; in one
    scheme, whichever it is, if that is not said. Plans of factors alone have no width.
    """
    room = _room_size(tokens=min(tokens, chunk), rows=rows, chunk=chunk)
    own = room_bytes(config, scheme, tokens=room[0], rows=room[1])
    each = {s: plan_bytes(config, scheme, s, tokens=room[0], width=width) for s in ADAPTERS}
    if adapters is None:
        adapters = [max(each, key=lambda s: each[s])] if width else []
    factors = factor_bytes(config, tokens=room[0], schemes=len(ADAPTERS))
    plans = factors + sum(each[s] for s in set(adapters))
    routed = len(ADAPTERS) if rows > 1 else 1
    program = program_bytes(config, schemes=len(set(adapters)), scales=True, routed=routed)
    return own + plans + PROGRAMS * program


def _room_size(*, tokens: int, rows: int, chunk: int) -> tuple[int, int]:
    """Return powers of two, so that rooms seldom grow; no more tokens than a chunk has."""
    scored = 1 << (rows - 1).bit_length()
    wanted = 1 << (tokens - 1).bit_length()
    return max(wanted if tokens > chunk else min(wanted, chunk), scored), scored


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


def _stretches(plans: Sequence[PackedDeltas | None]) -> list[Stretch]:
    """Return where rows have a plan; those of one plan stand together."""
    found: list[Stretch] = []
    begin = 0
    for place, plan in enumerate(plans):
        if place + 1 < len(plans) and plans[place + 1] is plan:
            continue
        if plan is not None:
            found.append(Stretch(plan, begin, place + 1 - begin))
        begin = place + 1
    return found


def _whole(base: PackedBase) -> WholeExperts | None:
    """Return the experts of a base that holds all of them, if it has any."""
    if base.config.experts is None:
        return None
    return WholeExperts(expert_shape(base.config, base.scheme), base.experts)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
