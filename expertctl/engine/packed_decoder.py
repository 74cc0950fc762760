"""The decoder of CPUs: the calls of `decoder.Decoder`, run as programs of compiled kernels.

A plan of experts has a program that reads stretches of a prompt and one that reads a token; both
are made when the plan is first used and kept until another comes. A token allocates no row. One
thread at a time may use it: inputs and scores of a program are its own, not the caller's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.decoder import (
    NO_DELTAS,
    PREFILL_CHUNK,
    DecodeResult,
    Deltas,
    PrefillResult,
)
from expertctl.engine.decoder_inputs import check_modules, check_soft_prompt, checked_tokens
from expertctl.engine.decoder_program import DecoderProgram, prompt_program, step_program
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.linear import LinearDelta
from expertctl.engine.packed_base import PackedBase
from expertctl.engine.packed_delta import PackedDelta, pack_delta

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The programs of one plan; ``deltas`` are those that it was made from."""

    deltas: Mapping[str, LinearDelta]
    prompt: DecoderProgram
    step: DecoderProgram


class PackedDecoder:
    """A packed base that can be run by a crew; its weights are only read."""

    def __init__(self, base: PackedBase, crew: Crew, *, chunk: int = PREFILL_CHUNK) -> None:
        """Run a base; a prompt is read ``chunk`` tokens at a time."""
        self.config = base.config
        self.device = torch.device("cpu")
        self.modules = frozenset(base.config.linear_shapes())
        self._base, self._crew, self._chunk = base, crew, chunk
        self._plan: _Plan | None = None

    def prefill(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVPages,
        deltas: Deltas = NO_DELTAS,
        *,
        soft_prompt: Tensor | None = None,
        progress: Progress = no_progress,
    ) -> PrefillResult:
        """Read a prompt; ``progress`` counts its tokens and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], stand before the first token
        of a cache and count like tokens. The scores are those of the next call too: copy them.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token, a delta or a soft prompt that does not fit this base.
        """
        begin, started = cache.length, time.perf_counter()
        program, before, tokens = self._checked(ids, cache, deltas, soft_prompt)
        read = len(before) + len(tokens)
        cache.require(read)
        try:
            for start in range(0, read, self._chunk):
                end = min(start + self._chunk, read)
                self._read(program, before, tokens, start, end, cache)
                progress(end - start)
        except BaseException:
            cache.rewind(begin)
            raise
        program.scored[0] = program.hidden[end - start - 1]
        self._crew.run(program.score)
        return PrefillResult(self._logits(program), read, _ms_since(started))

    def decode(self, token: int, cache: KVPages, deltas: Deltas = NO_DELTAS) -> DecodeResult:
        """Read one more token; the scores are those of the next call too.

        Raises:
            BudgetError: when the cache is full.
            IncompatibleError: for a token or a delta that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        tokens = checked_tokens([token], self.config.vocab_size)
        program = self._programs(deltas).step
        cache.require(1)
        program.tokens[0], program.positions[0] = int(tokens[0]), position
        program.tables[0] = cache.table
        program.set_count(1)
        for part in (program.embed, program.layers, program.score):
            self._crew.run(part)
        cache.advance(1)
        return DecodeResult(self._logits(program), position, _ms_since(started))

    def rest(self) -> None:
        """Let go of what the passes of a plan share."""
        self._plan = None

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._plan is None

    def _checked(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVPages,
        deltas: Deltas,
        soft_prompt: Tensor | None,
    ) -> tuple[DecoderProgram, Numbers, Numbers]:
        tokens = checked_tokens(ids, self.config.vocab_size).numpy()
        program = self._programs(deltas).prompt
        if soft_prompt is None:
            return program, np.empty((0, self.config.hidden_size), np.float32), tokens
        check_soft_prompt(soft_prompt, self.config.hidden_size, length=cache.length)
        return program, soft_prompt.float().numpy(), tokens

    def _read(
        self,
        program: DecoderProgram,
        before: Numbers,
        tokens: Numbers,
        start: int,
        end: int,
        cache: KVPages,
    ) -> None:
        """Read rows ``start`` to ``end`` of [soft prompt, tokens]."""
        count, virtual = end - start, max(min(len(before), end) - start, 0)
        program.tokens[:count] = 0
        program.tokens[virtual:count] = tokens[
            max(start - len(before), 0) : max(end - len(before), 0)
        ]
        program.positions[:count] = np.arange(cache.length, cache.length + count)
        program.tables[:count] = cache.table
        program.set_count(count)
        self._crew.run(program.embed)
        program.hidden[:virtual, : before.shape[1]] = before[start : start + virtual]
        self._crew.run(program.layers)
        cache.advance(count)

    def _programs(self, deltas: Deltas) -> _Plan:
        if self._plan is None or self._plan.deltas is not deltas:
            check_modules(deltas.keys(), self.modules)
            packed: dict[str, PackedDelta] = {n: pack_delta(d) for n, d in deltas.items()}
            self._plan = _Plan(
                deltas,
                prompt_program(self._base, packed, self._chunk),
                step_program(self._base, packed, 1),
            )
        return self._plan

    def _logits(self, program: DecoderProgram) -> Tensor:
        return torch.from_numpy(program.logits[0, : self.config.vocab_size])


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
