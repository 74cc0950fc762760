"""Keys and values of a text, preallocated; one generation at a time owns them.

Layout ``[layer, kv_head, capacity, head_dim]``: heads stand ``capacity`` rows apart whatever the
current length is. Memory is not cleared, rows at and beyond ``length`` are never read. A text that
does not fit is an error, old rows are never pushed out.
"""

import torch
from torch import Tensor

from expertctl.engine.kv_room import KVRoom
from expertctl.package.model_config import ModelConfig


class KVCache(KVRoom):
    """Room for ``capacity`` tokens; `length` of them are filled."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve the memory, once."""
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        super().__init__(capacity)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, filled or not."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the step's rows ``[kv_heads, tokens, head_dim]`` behind the filled ones.

        Returns all keys and values of the layer up to them, as views. The rows count as filled
        after `advance` only, so a step that fails leaves the cache as it was.
        """
        end = self.length + keys.shape[1]
        self._keys[layer, :, self.length : end].copy_(keys)
        self._values[layer, :, self.length : end].copy_(values)
        return self._keys[layer, :, :end], self._values[layer, :, :end]

    def copy_from(self, other: "KVCache", tokens: int) -> None:
        """Become the first ``tokens`` of another cache of the same base; that one stays as it is.

        Raises:
            BudgetError: when they do not fit.
        """
        assert tokens <= other.length
        self.reset()
        self.require(tokens)
        for own, others in ((self._keys, other._keys), (self._values, other._values)):
            own[:, :, :tokens].copy_(others[:, :, :tokens])
        self.advance(tokens)

    def check_integrity(self) -> None:
        """Assert what always holds: a possible length, numbers in every filled row."""
        assert 0 <= self.length <= self.capacity
        assert self._keys.shape == self._values.shape
        for filled in (self._keys[:, :, : self.length], self._values[:, :, : self.length]):
            assert bool(torch.isfinite(filled).all())
