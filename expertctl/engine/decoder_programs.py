"""The room of a packed decoder and the programs in it: made when needed, kept, and let go of.

What they take at most follows from a configuration, so it is known before any weight is read.
"""

from collections.abc import Collection, Sequence

from expertctl.engine.decoder import PREFILL_CHUNK
from expertctl.engine.decoder_program import DecoderProgram, decoder_program, program_bytes
from expertctl.engine.decoder_room import DecoderRoom, factor_bytes, plan_bytes, room_bytes
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.moe.routed_experts import RoutedExperts
from expertctl.engine.packed_base import PackedBase
from expertctl.engine.packed_delta import PackedDeltas
from expertctl.engine.program_variant import Variant, variant
from expertctl.package.model_config import ModelConfig

PROGRAMS = 4
"""How many programs are kept, those used last: prompts and steps with two kinds of plans.

Or, while layers are timed, with one kind in operations of its own and fused.
"""
ADAPTERS = (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16, Scheme.INT8)
"""What plans may be stored in."""


class DecoderPrograms:
    """Owns what one decoder computes with beside its weights; one thread at a time asks for it."""

    def __init__(self, base: PackedBase, experts: RoutedExperts | None, *, chunk: int) -> None:
        """Begin with nothing; prompts are read ``chunk`` tokens at a time."""
        self._base, self._experts, self._chunk = base, experts, chunk
        self._room: DecoderRoom | None = None
        self._programs: dict[Variant, DecoderProgram] = {}

    def __len__(self) -> int:
        """Return how many programs there are."""
        return len(self._programs)

    @property
    def is_empty(self) -> bool:
        """Whether there is neither room nor program."""
        return self._room is None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        if self._room is None:
            return 0
        return self._room.nbytes + sum(self._bytes_of(each) for each in self._programs)

    def let_go(self) -> None:
        """Let go of all of it."""
        self._room, self._programs = None, {}

    def room(self, *, tokens: int, rows: int) -> DecoderRoom:
        """Return a room that is large enough; one that is too small is let go of first."""
        held = (0, 0) if self._room is None else self._room.size
        wanted = _room_size(tokens=tokens, rows=rows, chunk=self._chunk)
        size = (max(held[0], wanted[0]), max(held[1], wanted[1]))
        if self._room is None or size != held:
            self.let_go()
            base = self._base
            self._room = DecoderRoom(base.config, base.scheme, tokens=size[0], rows=size[1])
        return self._room

    def program(
        self,
        room: DecoderRoom,
        caches: Sequence[KVPages],
        plans: Sequence[PackedDeltas | None],
        *,
        together: bool,
        fused: bool,
    ) -> DecoderProgram:
        """Return the program that reads texts with these caches and plans in a room.

        ``together``: consecutive tokens of one text; ``fused`` as in `Variant`.
        """
        numbers = caches[0].numbers
        assert all(cache.numbers is numbers for cache in caches), "pages of one kind"
        there = [plan for plan in plans if plan is not None]
        wanted = variant(together=together, numbers=numbers, plans=there, fused=fused)
        program = self._programs.pop(wanted, None)
        if program is None:
            while len(self._programs) >= PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = decoder_program(self._base, room, wanted, self._experts)
        self._programs[wanted] = program
        return program

    def _bytes_of(self, wanted: Variant) -> int:
        cached = self._experts is not None and not self._experts.is_whole
        return program_bytes(
            self._base.config,
            schemes=len(wanted.adapters),
            scales=wanted.scales,
            routed=len(wanted.routed),
            lanes=cached,
        )


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
    are read in one step; several rows also between two layers of a prompt, in a room of their own.
    Plans are up to ``width`` wide, those of one batch in the schemes
    ``adapters``; None: all in any one scheme. Plans of factors alone have no width.
    """
    size = _room_size(tokens=min(tokens, chunk), rows=rows, chunk=chunk)
    sizes = [size]
    if rows > 1 and config.experts is None:
        sizes.append(_room_size(tokens=rows, rows=rows, chunk=chunk))
    return sum(
        _bytes_of_room(config, scheme, size, width=width, rows=rows, adapters=adapters)
        for size in sizes
    )


def _bytes_of_room(
    config: ModelConfig,
    scheme: Scheme,
    size: tuple[int, int],
    *,
    width: int,
    rows: int,
    adapters: Collection[Scheme] | None,
) -> int:
    """Return the bytes of a room with its programs and what plans add to it."""
    own = room_bytes(config, scheme, tokens=size[0], rows=size[1])
    each = {s: plan_bytes(config, scheme, s, tokens=size[0], width=width) for s in ADAPTERS}
    if adapters is None:
        adapters = [max(each, key=lambda s: each[s])] if width else []
    factors = factor_bytes(config, tokens=size[0], schemes=len(ADAPTERS))
    plans = factors + sum(each[s] for s in set(adapters))
    routed = len(ADAPTERS) if rows > 1 else 1
    program = program_bytes(
        config, schemes=len(set(adapters)), scales=True, routed=routed, lanes=True
    )
    return own + plans + PROGRAMS * program


def _room_size(*, tokens: int, rows: int, chunk: int) -> tuple[int, int]:
    """Return powers of two, so that rooms seldom grow; no more tokens than a chunk has."""
    scored = 1 << (rows - 1).bit_length()
    wanted = 1 << (tokens - 1).bit_length()
    return max(wanted if tokens > chunk else min(wanted, chunk), scored), scored
