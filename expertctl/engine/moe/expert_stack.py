"""`ExpertStack`: routed experts stacked in tensors on a device, and how they get there.

There is one tensor for what reads a token, gate above up, and one for down; an expert is a row of
both. Row 0 is the *dummy*, all zero: missing experts are looked up there, so a product over all
chosen experts needs no condition, and no other expert ever stands in. The rows after it are the
blocks of `expert_memory`, for experts of all layers.

A thread reads an expert into a buffer of the machine's memory and copies it from there. The copy
runs beside all computation except what could read the row's old expert: `copy_order` has a diagram.
The thread waits for the end of the copy, so a block is known to hold an expert only after it does.
"""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.accelerator import told_when_full
from expertctl.engine.feed_forward import FeedForward
from expertctl.engine.linear import Linear
from expertctl.engine.moe.copy_order import CopyStream, LastReads
from expertctl.engine.moe.expert_memory import Read
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
DUMMY = 0
"""The row of the expert that is all zero."""
BUFFERS = 4
"""So many experts are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What every routed expert of a base looks like in a stack."""

    hidden: int
    intermediate: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> "StackShape":
        """Return the shape of a base's experts."""
        assert config.experts is not None, "a base with routed experts"
        inner = config.experts.intermediate_size
        return cls(hidden=config.hidden_size, intermediate=inner, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return 3 * self.intermediate * self.hidden * self.dtype.itemsize

    def parts(self, octets: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate above up [2 * intermediate, hidden] and down [hidden, intermediate]."""
        gate_up, down = octets.view(self.dtype).tensor_split([2 * self.intermediate * self.hidden])
        return gate_up.view(-1, self.hidden), down.view(-1, self.intermediate)


class ExpertStack:
    """The one owner of both tensors; any thread may fill its blocks."""

    def __init__(self, shape: StackShape, *, blocks: int, device: torch.device) -> None:
        """Allocate so many blocks, the dummy and the buffers."""
        self.shape, self._blocks = shape, blocks
        high, wide = 2 * shape.intermediate, shape.hidden
        count, dtype = 1 + blocks, shape.dtype
        with torch.inference_mode(False):  # threads write there, whatever mode they are in
            self.gate_up = torch.empty(count, high, wide, dtype=dtype, device=device)
            self.down = torch.empty(count, wide, shape.intermediate, dtype=dtype, device=device)
            buffers = [_Buffer(shape, device) for _ in range(BUFFERS)]
        self.gate_up[DUMMY].zero_()
        self.down[DUMMY].zero_()
        self._reads = LastReads(device, rows=count)
        self._buffers = SimpleQueue[_Buffer]()
        for buffer in buffers:
            self._buffers.put(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the dummy included."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def device(self) -> torch.device:
        """The device that it is on."""
        return self.gate_up.device

    def __len__(self) -> int:
        """How many blocks there are."""
        return self._blocks

    def place(self, number: int) -> int:
        """Return the row of a block."""
        return number + 1

    def fill(self, number: int, read: Read) -> int:
        """Fill a block, in any thread; return what ``read`` returns.

        It waits for a buffer, and then until the copy is over. No lookup may lead to the block.

        Raises:
            BudgetError: when the device is full.
            DeviceError: when it failed.
        """
        buffer, row = self._buffers.get(), self.place(number)
        try:
            with told_when_full():
                size = read(buffer.emptied())
                buffer.send(self.gate_up[row], self.down[row], after=self._reads.of(row))
        finally:
            self._buffers.put(buffer)
        return size

    def note_read(self, rows: Numbers) -> None:
        """Note that the work queued until now could read these rows."""
        self._reads.note(rows)

    def wait_for_reads(self) -> None:
        """Wait until what was noted last is computed."""
        self._reads.wait()

    def expert(self, row: int, module: str) -> FeedForward:
        """Return the expert that is in a row now, as the module of that name."""
        gate, up = self.gate_up[row].tensor_split(2)
        return FeedForward(
            Linear(f"{module}.gate_proj", gate, None),
            Linear(f"{module}.up_proj", up, None),
            Linear(f"{module}.down_proj", self.down[row], None),
        )

    def apply(self, x: Tensor, rows: Tensor) -> Tensor:
        """Apply to each token its experts: [tokens, hidden], [tokens, used] -> [.., hidden].

        All is token-major and reads no number back from the device, so it can be captured.
        """
        tokens, used = rows.shape
        both = self._gate_up(x, rows).view(tokens, used, 2, -1)
        gated = F.silu(both[:, :, 0]) * both[:, :, 1]  # [tokens, used, intermediate]
        down = self.down.index_select(0, rows.flatten())
        middle = gated.flatten(0, 1).to(down.dtype)[:, :, None]
        return torch.bmm(down, middle).view(tokens, used, -1).to(x.dtype)

    def _gate_up(self, x: Tensor, rows: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, used * 2 * intermediate], one product for each token."""
        gate_up = self.gate_up.index_select(0, rows.flatten())
        each = gate_up.view(len(rows), -1, self.shape.hidden)
        return torch.bmm(each, x.to(each.dtype)[:, :, None])[:, :, 0].to(x.dtype)


class _Buffer:
    """Room for one expert on its way, and the stream that it is copied on."""

    def __init__(self, shape: StackShape, device: torch.device) -> None:
        octets = torch.empty(shape.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._numbers: Numbers = octets.numpy()
        self._parts = shape.parts(octets)
        self._stream = CopyStream(device)

    def emptied(self) -> Numbers:
        """Return its bytes, once nothing is copied from them any more."""
        self._stream.wait()
        return self._numbers

    def send(self, gate_up: Tensor, down: Tensor, *, after: torch.cuda.Event | None) -> None:
        """Copy what was read, after that event, and wait until it is there."""
        self._stream.copy(zip((gate_up, down), self._parts, strict=True), after=after)


def stack_bytes(shape: StackShape, *, blocks: int) -> int:
    """Return what a stack takes on the device: its blocks, and the dummy."""
    return (1 + blocks) * shape.nbytes


def buffers_bytes(shape: StackShape) -> int:
    """Return what its buffers take in the memory of the machine at most."""
    return BUFFERS * pinned_bytes(shape.nbytes)


def pinned_bytes(size: int) -> int:
    """Return what so many bytes take of the machine's memory, which torch pins by powers of two."""
    return 1 << (size - 1).bit_length()
