"""Decoding on a CUDA device with some of the routed experts there, against all of them there.

One process holds the base once and its experts twice: all of them in one stack, and in another one
as many as the share allows, including the pool. Both read the same sequence with captured steps, in
turns. A missing expert is read from the files of the base, which may be in the page cache; a fifth
of the predictions is made wrong. A sequence ends before steps need a longer context, so all its
graphs were captured in the warm-up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine_process import EngineProcess, MeasuredEngine
from benchmarks.harness import Row, Seconds, compare_rates, make_absent_row, take_turns, time_action
from benchmarks.routed.decoders import split_blocks
from benchmarks.routed.expert_sources import ImperfectPrefetchCache
from benchmarks.routed.hit_rates import SHARE
from expertctl.engine.cpu.packed_base import make_expert_shape, packed_base_bytes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.moe.counters import ExpertActivity
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.torch.cuda_graph_decoder import MIN_CAPACITY, CudaGraphDecoder
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.devices import find_free_bytes, get_device_name, is_cuda_available
from expertctl.engine.torch.expert_stack import (
    STAGING_BUFFERS,
    ExpertStack,
    StackRowReader,
    StackShape,
)
from expertctl.engine.torch.stacked_experts import StackedExperts, open_stacked_experts
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config

CASE = f"decode, {SHARE:.0%} resident, CUDA"
TARGET = ">= 0.6"
STEPS, WARM_UP = 48, 96
"""Tokens of a run, and those that each decoder reads before it is measured, to learn slots."""
CONTEXT = MIN_CAPACITY
"""KV cache capacity in tokens: as many as steps read from the start."""
_DTYPE = torch.bfloat16
_MEMORY_MARGIN = 2 << 30
"""Bytes for contexts, kernels, workspaces, graphs and buffers."""


class DevicePlacement(Enum):
    """The experts on the device."""

    ALL = "all resident"
    SOME = "some resident, the others read from the files of the base"


class DeviceFigure(Enum):
    """The counts since the warm-up, if some experts are missing."""

    MISSES = "experts that were asked for and had no slot, of 1"
    READ = "bytes of files that were read for a token"
    WAITED = "milliseconds that the device waited for experts, for a token"


@dataclass(frozen=True, slots=True)
class DeviceFollowTask:
    """Decode so many tokens, one after the other, from the end of the last task."""

    held: DevicePlacement
    tokens: int


@dataclass(frozen=True, slots=True)
class DeviceReportTask:
    """Report a figure."""

    figure: DeviceFigure


DeviceTask = DeviceFollowTask | DeviceReportTask


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """A base in a directory; sequences go through the first ``tokens`` of the vocabulary."""

    directory: Path
    tokens: int
    share: float = SHARE
    device: str = "cuda"


def compare_on_device(directory: Path, *, tokens: int, simulates: str, rounds: int) -> Row:
    """Compare both on the device of this machine, if it has one with enough memory for them."""
    if not is_cuda_available():
        return make_missing_row("there is none here")
    if (needed := estimate_device_bytes(read_model_config(directory))) > (
        free := find_free_bytes()
    ):
        return make_missing_row(
            f"both want {needed / 1e9:.1f} GB of the device, {free / 1e9:.1f} are free"
        )
    setting = DeviceSetup(directory, tokens)
    with EngineProcess(make_opener(setting)) as process:
        return measure_turns(process.run, simulates=f"{simulates}, {process.about}", rounds=rounds)


def make_opener(setting: DeviceSetup) -> Callable[[], MeasuredEngine[DeviceTask]]:
    """Return a function that opens both decoders."""
    return partial(DeviceDecoders, setting)


def measure_turns(run: Callable[[DeviceTask, int], Seconds], *, simulates: str, rounds: int) -> Row:
    """Run both decoders in turns, and compare them."""
    runs = {held.name: partial(run, DeviceFollowTask(held, STEPS), 1) for held in DevicePlacement}
    seconds = take_turns(runs, rounds=rounds)
    misses, read, waited = (run(DeviceReportTask(figure), 1) for figure in DeviceFigure)
    found = compare_rates(
        CASE, seconds[DevicePlacement.SOME.name], seconds[DevicePlacement.ALL.name],
        work=(STEPS, STEPS), rival=DevicePlacement.ALL.value, unit="tok/s", target=TARGET,
    )  # fmt: skip
    note = (
        f"{simulates}; {misses:.0%} of requests had no slot; for a token {read / 1e6:.1f} MB were "
        f"read and {waited:.2f} ms waited"
    )
    return replace(found, note=note)


def make_missing_row(why: str) -> Row:
    """Return the row of a machine that cannot measure it; no target is missed there."""
    found = make_absent_row(CASE, rival=DevicePlacement.ALL.value, install=why)
    return replace(found, ok=None, unit="tok/s", better="higher", target=TARGET)


def estimate_device_bytes(config: ModelConfig) -> int:
    """Estimate the maximum memory of both on the device, in bytes."""
    whole = packed_base_bytes(config, Scheme.BFLOAT16)
    routed = whole - packed_base_bytes(config, Scheme.BFLOAT16, experts=False)
    return whole + int(SHARE * routed) + _MEMORY_MARGIN


class DeviceDecoders:
    """Both decoders of one base, and their sequence."""

    def __init__(self, setting: DeviceSetup) -> None:
        """Load the base, and run each decoder until slots are learnt and graphs captured."""
        config, device = read_model_config(setting.directory), torch.device(setting.device)
        weights = load_base_weights(
            setting.directory, config, dtype=_DTYPE, device=device, experts=False
        )
        self.about = f"bf16, {get_device_name() if device.type == 'cuda' else device}"
        self.weight_bytes = weights.nbytes
        held = {
            DevicePlacement.ALL: _load_all(setting.directory, config, device),
            DevicePlacement.SOME: _load_some(setting.directory, config, device, setting.share),
        }
        self.texts = {
            name: DeviceDecoder(
                CudaGraphDecoder(config, weights, experts=experts), experts, setting.tokens
            )
            for name, experts in held.items()
        }
        for text in self.texts.values():
            text.decode(CONTEXT)  # to its end: every stage was captured then
            text.decode(WARM_UP)
        self._before, self._from = self._activity, self._read_prompt_bytes

    def run(self, task: DeviceTask, threads: int) -> float:
        """Run a task, or report a figure."""
        match task:
            case DeviceFollowTask(held, tokens):
                return self.texts[held].decode(tokens)
            case DeviceReportTask(figure):
                return self._read_figure(figure)

    def close(self) -> None:
        """Stop reading experts."""
        for text in self.texts.values():
            text.experts.close()

    @property
    def _activity(self) -> ExpertActivity:
        cache = self.texts[DevicePlacement.SOME].experts.cache
        assert cache is not None
        return cache.activity()

    @property
    def _read_prompt_bytes(self) -> int:
        return self.texts[DevicePlacement.SOME].read

    def _read_figure(self, figure: DeviceFigure) -> float:
        did, tokens = (
            self._activity.since(self._before),
            max(self._read_prompt_bytes - self._from, 1),
        )
        match figure:
            case DeviceFigure.MISSES:
                return did.misses / max(did.requests, 1)
            case DeviceFigure.READ:
                return did.read_bytes / tokens
            case DeviceFigure.WAITED:
                return did.waited_ms / tokens


class DeviceDecoder:
    """A decoder and its sequence; tokens follow each other in the vocabulary."""

    def __init__(self, decoder: CudaGraphDecoder, experts: StackedExperts, tokens: int) -> None:
        """Read the first ``tokens`` of the vocabulary repeatedly."""
        self.decoder, self.experts, self._tokens = decoder, experts, tokens
        arena = StaticKVCache(
            decoder.config, rows=1, capacity=CONTEXT, dtype=_DTYPE, device=decoder.device
        )
        self.row = arena.get_row(0)
        self.read = 0

    def decode(self, count: int) -> Seconds:
        """Decode so many tokens one after the other, at most `CONTEXT`."""
        ids = [(self.read + number) % self._tokens for number in range(count)]
        self.read += count
        if self.row.length + count > CONTEXT:
            self.row.reset()
        return time_action(partial(self._decode, ids))()

    def _decode(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.decoder.decode(token, self.row)


def _load_all(directory: Path, config: ModelConfig, device: torch.device) -> StackedExperts:
    stored, shape = read_base_tensors(directory, config), StackShape.from_config(config, _DTYPE)
    experts = open_stacked_experts(config, stored, shape, plan=None, device=device)
    experts.load_all()
    return experts


def _load_some(
    directory: Path, config: ModelConfig, device: torch.device, share: float
) -> StackedExperts:
    """Return as many experts as the share allows, with all slots filled."""
    routed = config.experts
    assert routed is not None
    found, layers, shape = (
        split_blocks(routed, share),
        len(routed.layers),
        StackShape.from_config(config, _DTYPE),
    )
    stack = ExpertStack(shape, blocks=layers * found.slots + found.pool, device=device)
    memory = ExpertMemory(
        make_expert_shape(config, Scheme.BFLOAT16),
        layers=layers,
        experts=routed.count,
        blocks=stack,
    )
    reader = StackRowReader(read_base_tensors(directory, config), shape)
    slots = [LayerSlots(experts=routed.count, capacity=found.slots) for _ in range(layers)]
    cache = ImperfectPrefetchCache(
        memory, reader, layer_numbers=routed.layers, slots=slots, threads=STAGING_BUFFERS - 1
    )
    cache.fill_slots([[]] * layers)
    return StackedExperts(routed, stack, reader, cache=cache)
