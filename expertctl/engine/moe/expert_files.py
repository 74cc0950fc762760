"""Routed experts in the files of a base: each is read alone, without touching the rest."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from expertctl.engine.compact_expert import can_be_compact
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_base import EXPERTS, expert_places, expert_shape
from expertctl.engine.tensor_packing import pack_tensor
from expertctl.package.base_tensors import StoredTensor
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import MoeCold
from expertctl.store.copy_file import Dropped, always

Numbers = np.ndarray[Any, Any]
IsWanted = Callable[[], bool]
"""Called now and then during a read: tells whether it is still wanted."""


class ExpertReader(Protocol):
    """Reads experts; several threads may use it at a time."""

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return how many bytes of files that took.

        Raises:
            InvalidPackageError: when a file cannot be read to its end.
            Dropped: when it is no longer wanted; then anything may be in the block.
        """

    def lend(self, layer: int, expert: int) -> int | None:
        """Return the address of an expert that can be computed where it lies now.

        Its bytes stay the same as long as this reader lives, though the system may need time to
        bring them later. None where it has to be read.
        """


class StoredExperts:
    """Reads the rows of an expert from safetensors files, and packs them.

    Where the files hold the experts of a layer as one tensor, these are some of its rows.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: ModelConfig, scheme: Scheme
    ) -> None:
        """Read from where the tensors of a base lie."""
        self._stored, self.shape = stored, expert_shape(config, scheme)
        self.scheme = scheme
        self.is_compact = can_be_compact(scheme)
        """Whether experts are compact in a copy of the base."""

    @property
    def cold(self) -> MoeCold:
        """How experts come from the disk."""
        return "read"

    @property
    def compact(self) -> int:
        """Bytes of a compact expert; 0: experts are not compact."""
        return 0

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        at, read = f"model.layers.{layer}.{EXPERTS}{expert}", 0
        for name, place in expert_places(at, self.shape, block).items():
            if not is_wanted():
                raise Dropped(read)
            tensor = self._stored[name]
            pack_tensor(tensor, place)
            read += tensor.size
        return read

    def read_whole(self, layer: int, expert: int, block: Numbers) -> int:
        """Do the same as `read`, which always gives experts as they are computed."""
        return self.read(layer, expert, block)

    def lend(self, layer: int, expert: int) -> int | None:
        """Return None: what files hold has to be packed."""
        return None

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""
