"""Decoding on a CUDA device with some of the routed experts there, against all of them there.

One process holds the base once and its experts twice: all of them in a stack, and in another one as
many as the share says, the pool among them. Both read the same text with captured steps, in turn.
An expert that is missing is read from the files of the base, which the system may have in its
cache; a fifth of the guesses is made wrong. A text ends before steps look at more places, so all
its graphs were captured in the warm-up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine_process import Engine, EngineProcess
from benchmarks.harness import Row, Seconds, absent, compare_rates, take_turns, timed
from benchmarks.routed.foresight import MisledCache
from benchmarks.routed.hit_rows import SHARE
from benchmarks.routed.homes import split
from expertctl.engine.accelerator import device_name, free_bytes, has_cuda
from expertctl.engine.base_weights import load_base
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.expert_rows import ExpertRows
from expertctl.engine.moe.expert_stack import BUFFERS, ExpertStack, StackShape
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.report import Activity
from expertctl.engine.moe.stacked_experts import StackedExperts, open_experts
from expertctl.engine.packed_base import expert_shape, packed_bytes
from expertctl.engine.static_decoder import SHORTEST, StaticDecoder
from expertctl.engine.static_kv import KVArena
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import ModelConfig, read_config

CASE = f"decode, {SHARE:.0%} resident, CUDA"
TARGET = ">= 0.6"
STEPS, WARM_UP = 48, 96
"""Tokens of a run, and those that each reads before it is measured, to learn slots."""
CONTEXT = SHORTEST
"""Room for tokens: as many places as steps look at from the start."""
_DTYPE = torch.bfloat16
_BESIDE = 2 << 30
"""Bytes for contexts, kernels, workspaces, graphs and buffers."""


class Held(Enum):
    """Which experts are on the device."""

    ALL = "all resident"
    SOME = "some resident, the others read from the files of the base"


class Figure(Enum):
    """What was counted since the warm-up, where some experts are missing."""

    MISSES = "experts that were asked for and had no slot, of 1"
    READ = "bytes of files that were read for a token"
    WAITED = "milliseconds that the device waited for experts, for a token"


@dataclass(frozen=True, slots=True)
class Follow:
    """Read so many tokens, one after the other, from where the last task ended."""

    held: Held
    tokens: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Say a figure."""

    figure: Figure


DeviceTask = Follow | Tell


@dataclass(frozen=True, slots=True)
class Setting:
    """A base in a directory; texts go through the first ``tokens`` of the vocabulary."""

    directory: Path
    tokens: int
    share: float = SHARE
    device: str = "cuda"


def row(directory: Path, *, tokens: int, simulates: str, rounds: int) -> Row:
    """Compare both on the device of this machine, if it has one with room for them."""
    if not has_cuda():
        return missing("there is none here")
    if (needed := room_bytes(read_config(directory))) > (free := free_bytes()):
        return missing(f"both want {needed / 1e9:.1f} GB of the device, {free / 1e9:.1f} are free")
    setting = Setting(directory, tokens)
    with EngineProcess(opened_by(setting)) as process:
        return measured(process.run, simulates=f"{simulates}, {process.about}", rounds=rounds)


def opened_by(setting: Setting) -> Callable[[], Engine[DeviceTask]]:
    """Return what opens both decoders."""
    return partial(OnDevice, setting)


def measured(run: Callable[[DeviceTask, int], Seconds], *, simulates: str, rounds: int) -> Row:
    """Have both decoders read in turn, and compare them."""
    runs = {held.name: partial(run, Follow(held, STEPS), 1) for held in Held}
    seconds = take_turns(runs, rounds=rounds)
    misses, read, waited = (run(Tell(figure), 1) for figure in Figure)
    found = compare_rates(
        CASE, seconds[Held.SOME.name], seconds[Held.ALL.name], work=(STEPS, STEPS),
        rival=Held.ALL.value, unit="tok/s", target=TARGET,
    )  # fmt: skip
    note = (
        f"{simulates}; {misses:.0%} of requests had no slot; for a token {read / 1e6:.1f} MB were "
        f"read and {waited:.2f} ms waited"
    )
    return replace(found, note=note)


def missing(why: str) -> Row:
    """Return the row of a machine that cannot measure it; no target is missed there."""
    found = absent(CASE, rival=Held.ALL.value, install=why)
    return replace(found, ok=None, unit="tok/s", better="higher", target=TARGET)


def room_bytes(config: ModelConfig) -> int:
    """Return about how many bytes of the device both take at most."""
    whole = packed_bytes(config, Scheme.BFLOAT16)
    routed = whole - packed_bytes(config, Scheme.BFLOAT16, experts=False)
    return whole + int(SHARE * routed) + _BESIDE


class OnDevice:
    """Both decoders of one base, and what they read."""

    def __init__(self, setting: Setting) -> None:
        """Load the base, and let each read until slots are learned and graphs captured."""
        config, device = read_config(setting.directory), torch.device(setting.device)
        weights = load_base(setting.directory, config, dtype=_DTYPE, device=device, experts=False)
        self.about = f"bf16, {device_name('cuda') if device.type == 'cuda' else device}"
        self.weight_bytes = weights.nbytes
        held = {
            Held.ALL: _whole(setting.directory, config, device),
            Held.SOME: _partly(setting.directory, config, device, setting.share),
        }
        self.texts = {
            name: Text(StaticDecoder(config, weights, experts=experts), experts, setting.tokens)
            for name, experts in held.items()
        }
        for text in self.texts.values():
            text.follow(CONTEXT)  # to its end: every stage was captured then
            text.follow(WARM_UP)
        self._before, self._from = self._activity, self._read

    def run(self, task: DeviceTask, threads: int) -> float:
        """Do a task, or say a figure."""
        match task:
            case Follow(held, tokens):
                return self.texts[held].follow(tokens)
            case Tell(figure):
                return self._told(figure)

    def close(self) -> None:
        """End the reading of experts."""
        for text in self.texts.values():
            text.experts.close()

    @property
    def _activity(self) -> Activity:
        cache = self.texts[Held.SOME].experts.cache
        assert cache is not None
        return cache.activity()

    @property
    def _read(self) -> int:
        return self.texts[Held.SOME].read

    def _told(self, figure: Figure) -> float:
        did, tokens = self._activity.since(self._before), max(self._read - self._from, 1)
        match figure:
            case Figure.MISSES:
                return did.misses / max(did.requests, 1)
            case Figure.READ:
                return did.read_bytes / tokens
            case Figure.WAITED:
                return did.waited_ms / tokens


class Text:
    """A decoder and the text that it reads; tokens follow each other in the vocabulary."""

    def __init__(self, decoder: StaticDecoder, experts: StackedExperts, tokens: int) -> None:
        """Read the first ``tokens`` of the vocabulary again and again."""
        self.decoder, self.experts, self._tokens = decoder, experts, tokens
        arena = KVArena(
            decoder.config, rows=1, capacity=CONTEXT, dtype=_DTYPE, device=decoder.device
        )
        self.row = arena.row(0)
        self.read = 0

    def follow(self, count: int) -> Seconds:
        """Read so many tokens one after the other, at most `CONTEXT`."""
        ids = [(self.read + number) % self._tokens for number in range(count)]
        self.read += count
        if self.row.length + count > CONTEXT:
            self.row.reset()
        return timed(partial(self._decode, ids))()

    def _decode(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.decoder.decode(token, self.row)


def _whole(directory: Path, config: ModelConfig, device: torch.device) -> StackedExperts:
    stored, shape = base_tensors(directory, config), StackShape.of(config, _DTYPE)
    experts = open_experts(config, stored, shape, plan=None, device=device)
    experts.fill_all()
    return experts


def _partly(
    directory: Path, config: ModelConfig, device: torch.device, share: float
) -> StackedExperts:
    """Return as many experts as the share says, all slots filled."""
    routed = config.experts
    assert routed is not None
    found, layers, shape = split(routed, share), len(routed.layers), StackShape.of(config, _DTYPE)
    stack = ExpertStack(shape, blocks=layers * found.slots + found.pool, device=device)
    memory = ExpertMemory(
        expert_shape(config, Scheme.BFLOAT16), layers=layers, experts=routed.count, blocks=stack
    )
    reader = ExpertRows(base_tensors(directory, config), shape)
    slots = [LayerSlots(experts=routed.count, capacity=found.slots) for _ in range(layers)]
    cache = MisledCache(memory, reader, numbers=routed.layers, slots=slots, threads=BUFFERS - 1)
    cache.fill([[]] * layers)
    return StackedExperts(routed, stack, reader, cache=cache)
