"""`ExpertStack`: routed experts stacked in two tensors on a device, and the copies into them.

One tensor holds gate above up, one holds down; an expert is a row of both. Row 0 is the *dummy*,
all zero: missing experts are looked up there, so a product over all chosen experts needs no
condition, and no other expert ever stands in. The rows after it are the blocks of `ExpertMemory`,
for experts of all layers. `StackRowReader` reads an expert from the files of a base as the rows
that torch multiplies; rows stored in the dtype of the run are read straight to where they are
wanted. A thread reads an expert into a staging buffer in host memory, copies it from there and
waits for the end of the copy, so a block is known to hold an expert only after it does.

Computation is queued on one stream, copies on several others. A copy into a row waits for the last
work that could read the row's old expert, and for nothing that was queued after that:

    host      request L   .   .   .   .   .   all loaded; lookup        .   end
    compute   choose L | resident L | E1              | missing L | E2 | choose in the next layer
    copies        after E0: copy missing experts   | C1
                               after E1: copy prefetched experts    .   .  | C2

`resident` and `missing` read the rows that were in the lookup of their layer. Each records an
event, E1 and E2, for these rows. A row that is taken at `request` is in no lookup any more, so the
copy into it waits for the last event of that row, E0, and runs in parallel with `resident`. A row
that is taken after `resident` was queued may be one that `resident` reads, so the copy into it
waits for E1. A copy records an event, too: C1. Until it has happened, the expert is not reported as
present, and its staging buffer is not overwritten. So no computation waits for a copy on the
device: it is queued when the copy is over. On a CPU all work is done immediately, and nothing
waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.base_files import iter_row_portions, read_tensor
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ReadExpert
from expertctl.engine.torch.devices import acquire_stream, translate_device_errors
from expertctl.engine.torch.functional import FeedForward, Linear, apply_clamped_gate
from expertctl.package.block_config import ClampedGate
from expertctl.package.model_config import ModelConfig
from expertctl.package.stored_tensor import StoredTensor
from expertctl.store.quantised_file import ReadCancelled, always_wanted

Numbers = np.ndarray[Any, Any]
_ALL_ROWS = slice(None)


class ReadEvents:
    """The event after the last work that could read each row.

    One thread records reads. Others may query a row that was taken: no new work reads it.
    """

    def __init__(self, device: torch.device, *, rows: int) -> None:
        """Start with the work of previous owners of the memory."""
        self._device = device
        self._is_queued = is_queued(device)
        self._events = np.full(rows, None, object)
        self._newest: torch.cuda.Event | None = None
        self.record(_ALL_ROWS)

    def record(self, rows: Numbers | slice) -> None:
        """Record that the work queued until now could read these rows."""
        if self._is_queued:
            self._newest = event = make_event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[rows] = event

    def find_event(self, row: int) -> "torch.cuda.Event | None":
        """Return the event that a copy into a row has to wait for, if any."""
        found: torch.cuda.Event | None = self._events[row]
        return found

    def wait(self) -> None:
        """Wait until the work that was recorded last is done."""
        if self._newest is not None:
            self._newest.synchronize()


class CopyStream:
    """A stream for copies, one at a time, each from the same host memory.

    It has one owner: no copy waits for another's, nor gets into a graph that is captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without a copy in progress."""
        is_queue = is_queued(device)
        self._lease = acquire_stream(device, computes=False) if is_queue else None
        self._copy_done = make_event() if is_queue else None

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: "torch.cuda.Event | None"
    ) -> None:
        """Copy into the first of each pair after an event; return when the copy is over."""
        if self._lease is None or self._copy_done is None:
            _copy_pairs(pairs)
            return
        stream = self._lease.stream
        if after is not None:
            stream.wait_event(after)
        try:
            with torch.cuda.stream(stream):
                _copy_pairs(pairs)
        finally:  # what was queued before an error still uses its memory
            self._copy_done.record(stream)
            self._copy_done.synchronize()

    def wait(self) -> None:
        """Wait until no copy is in progress, even if one ended with an error."""
        if self._copy_done is not None:
            self._copy_done.synchronize()


def is_queued(device: torch.device) -> bool:
    """Tell whether a device works asynchronously, in the order of its streams."""
    return device.type == "cuda"


def make_event() -> torch.cuda.Event:
    """Return an event on which a thread sleeps instead of polling."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types


def _copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        there.copy_(here, non_blocking=True)


DUMMY_ROW = 0
"""The row of the all-zero expert."""
STAGING_BUFFERS = 4
"""Experts that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """The shape of each routed expert of a base in a stack."""

    hidden: int
    intermediate: int
    dtype: torch.dtype
    clamped: ClampedGate | None = None
    """What experts compute in place of ``silu(gate) * up``; those experts have biases."""

    @classmethod
    def from_config(cls, config: ModelConfig, dtype: torch.dtype) -> "StackShape":
        """Return the shape of a base's experts."""
        assert config.experts is not None, "a base with routed experts"
        inner = config.experts.intermediate_size
        clamped = config.block.clamped_gate
        return cls(hidden=config.hidden_size, intermediate=inner, dtype=dtype, clamped=clamped)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return 3 * self.intermediate * self.hidden * self.dtype.itemsize

    def split(self, octets: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate above up [2 * intermediate, hidden] and down [hidden, intermediate]."""
        gate_up, down = octets.view(self.dtype).tensor_split([2 * self.intermediate * self.hidden])
        return gate_up.view(-1, self.hidden), down.view(-1, self.intermediate)


class ExpertStack:
    """Owner of both tensors; any thread may fill its blocks."""

    def __init__(self, shape: StackShape, *, blocks: int, device: torch.device) -> None:
        """Allocate the blocks, the dummy and the staging buffers."""
        self.shape, self._blocks = shape, blocks
        high, wide = 2 * shape.intermediate, shape.hidden
        count, dtype = 1 + blocks, shape.dtype
        with torch.inference_mode(False):  # threads in any mode write there
            self.gate_up = torch.empty(count, high, wide, dtype=dtype, device=device)
            self.down = torch.empty(count, wide, shape.intermediate, dtype=dtype, device=device)
            buffers = [_StagingBuffer(shape, device) for _ in range(STAGING_BUFFERS)]
        self.gate_up[DUMMY_ROW].zero_()
        self.down[DUMMY_ROW].zero_()
        self._read_events = ReadEvents(device, rows=count)
        self._buffers = SimpleQueue[_StagingBuffer]()
        for buffer in buffers:
            self._buffers.put(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the dummy included."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.gate_up.device

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._blocks

    def locate(self, number: int) -> int:
        """Return the row of a block."""
        return number + 1

    def fill(self, number: int, read: ReadExpert) -> int:
        """Fill a block, in any thread; return what ``read`` returns.

        It waits for a staging buffer, and then until the copy is over. No lookup may lead to the
        block.

        Raises:
            BudgetError: when the device is full.
            DeviceError: when it failed.
        """
        buffer, row = self._buffers.get(), self.locate(number)
        try:
            with translate_device_errors():
                size = read(buffer.acquire())
                buffer.copy_to(
                    self.gate_up[row], self.down[row], after=self._read_events.find_event(row)
                )
        finally:
            self._buffers.put(buffer)
        return size

    def record_reads(self, rows: Numbers) -> None:
        """Record that the work queued until now could read these rows."""
        self._read_events.record(rows)

    def wait_for_reads(self) -> None:
        """Wait until the work that was recorded last is done."""
        self._read_events.wait()

    def expert(
        self, row: int, module: str, biases: tuple[Tensor, Tensor] | None = None
    ) -> FeedForward:
        """Return the expert in a row, as the module of that name."""
        gate, up = self.gate_up[row].tensor_split(2)
        first, second, last = None, None, None
        if biases is not None:
            first, second = biases[0].tensor_split(2)
            last = biases[1]
        return FeedForward(
            Linear(f"{module}.gate_proj", gate, first),
            Linear(f"{module}.up_proj", up, second),
            Linear(f"{module}.down_proj", self.down[row], last),
            clamped=self.shape.clamped,
        )

    def apply(self, x: Tensor, rows: Tensor, biases: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Apply to each token its experts: [tokens, hidden], [tokens, used] -> [.., hidden].

        The order is token-major, and no value is read back from the device, so it can be captured.
        ``biases`` are those of the experts, [tokens, used, …].
        """
        tokens, used = rows.shape
        both = self._multiply_gate_up(x, rows).view(tokens, used, 2, -1)
        if biases is not None:
            both = both + biases[0].view_as(both)
        gate, up = both[:, :, 0], both[:, :, 1]  # [tokens, used, intermediate]
        clamped = self.shape.clamped
        gated = F.silu(gate) * up if clamped is None else apply_clamped_gate(gate, up, clamped)
        down = self.down.index_select(0, rows.flatten())
        middle = gated.flatten(0, 1).to(down.dtype)[:, :, None]
        made = torch.bmm(down, middle).view(tokens, used, -1).to(x.dtype)
        return made if biases is None else made + biases[1]

    def _multiply_gate_up(self, x: Tensor, rows: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, used * 2 * intermediate], one product for each token."""
        gate_up = self.gate_up.index_select(0, rows.flatten())
        each = gate_up.view(len(rows), -1, self.shape.hidden)
        return torch.bmm(each, x.to(each.dtype)[:, :, None])[:, :, 0].to(x.dtype)


class _StagingBuffer:
    """Host memory for one expert, and the stream that copies it."""

    def __init__(self, shape: StackShape, device: torch.device) -> None:
        octets = torch.empty(shape.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._numbers: Numbers = octets.numpy()
        self._parts = shape.split(octets)
        self._stream = CopyStream(device)

    def acquire(self) -> Numbers:
        """Return its bytes, once no copy reads them any more."""
        self._stream.wait()
        return self._numbers

    def copy_to(self, gate_up: Tensor, down: Tensor, *, after: torch.cuda.Event | None) -> None:
        """Copy what was read, after an event, and wait until the copy is over."""
        self._stream.copy(zip((gate_up, down), self._parts, strict=True), after=after)


def estimate_stack_bytes(shape: StackShape, *, blocks: int) -> int:
    """Return the bytes of a stack on the device: its blocks, and the dummy."""
    return (1 + blocks) * shape.nbytes


def estimate_staging_bytes(shape: StackShape) -> int:
    """Return the bytes of its buffers in host memory, at most."""
    return STAGING_BUFFERS * round_pinned_bytes(shape.nbytes)


def round_pinned_bytes(size: int) -> int:
    """Return the host memory that a pinned tensor takes: torch rounds up to powers of two."""
    return 1 << (size - 1).bit_length()


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StackRowReader:
    """Reads the rows of an expert from safetensors files, in the dtype of a stack.

    If the files hold the experts of a layer as one tensor, these are some of its rows.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], shape: StackShape) -> None:
        """Read the tensors of a base from where they are stored."""
        self._stored, self._shape = stored, shape

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return how many bytes of files that took.

        Raises:
            InvalidPackageError: when a file cannot be read to its end.
            ReadCancelled: when it is no longer wanted.
        """
        gate_up, down = self._shape.split(torch.from_numpy(block))
        gate, up = gate_up.tensor_split(2)
        read = 0
        names = ("gate_proj", "up_proj", "down_proj")
        stored = [
            self._stored[f"{expert_module_name(layer, expert)}.{name}.weight"] for name in names
        ]
        for tensor, rows in zip(stored, (gate, up, down), strict=True):
            if not is_wanted():
                raise ReadCancelled(read)
            read_stored_tensor(tensor, rows)
            read += tensor.size
        return read

    def read_matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer of an expert.

        Raises:
            InvalidPackageError: when the file cannot be read to its end.
        """
        tensor = self._stored[f"{module}.weight"]
        rows = torch.empty(tensor.info.shape, dtype=self._shape.dtype)
        read_stored_tensor(tensor, rows)
        return rows

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return None: an expert must be on the device that computes it."""
        return None


def expert_module_name(layer: int, expert: int) -> str:
    """Return the module name of an expert in a layer of the base."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def read_stored_tensor(tensor: StoredTensor, rows: Tensor) -> None:
    """Fill a tensor in host memory with the numbers of a stored one, in its own dtype.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    dtype = _DTYPES[tensor.info.dtype]
    if dtype is rows.dtype and tensor.codec is None:
        read_tensor(tensor, rows.view(torch.uint8).numpy())
        return
    done = 0
    for numbers in iter_row_portions(tensor):
        part = torch.from_numpy(numbers).view(dtype)
        rows[done : done + len(part)].copy_(part)
        done += len(part)
