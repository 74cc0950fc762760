"""A base on its way into memory: its configuration and tokenizer first, its weights when needed.

What a prompt costs is known before the weights are read, so what cannot fit is refused at once.
"""

from dataclasses import dataclass

import torch

from expertctl.digest import Progress, no_progress
from expertctl.engine.base_weights import load_base
from expertctl.engine.decoder import Decoder, pass_bytes
from expertctl.engine.generate import Model
from expertctl.engine.sampling import sample_bytes
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import UsageError
from expertctl.package.model_config import ModelConfig, read_config
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""What the matrices of a base may be held in."""
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base whose files are those that were added; no weights are in memory."""

    stored: StoredBase
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory: norms and biases stay float32."""
        total = 0
        for shape in self.config.tensor_shapes().values():
            elements = torch.Size(shape).numel()
            total += elements * (self.dtype.itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def context(self) -> int:
        """How many tokens it reads, with the answer."""
        return self.config.max_positions

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return self.config.kv_bytes(tokens, itemsize=_FLOAT_BYTES)

    def buffer_bytes(self, tokens: int) -> int:
        """What a pass over so many tokens needs besides weights and cache."""
        return pass_bytes(self.config, tokens) + sample_bytes(self.config.vocab_size)

    def is_same(self, other: "OpenBase") -> bool:
        """Tell whether the weights of another base are these, in the same dtype."""
        return (self.stored.path, self.stored.identity, self.dtype) == (
            other.stored.path,
            other.stored.identity,
            other.dtype,
        )


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base in memory."""

    model: Model
    nbytes: int
    warnings: tuple[str, ...]


def open_base(bases: BaseStore, stored: StoredBase, *, dtype: str, rehash: bool) -> OpenBase:
    """Check the files of a base, by every byte with ``rehash``, and read the small ones.

    Raises:
        BaseMismatchError: when they are not those that were added.
        IncompatibleError: when the decoder does not support such a model.
    """
    if rehash:
        bases.rehash(stored)
    else:
        bases.check(stored)
    config = read_config(stored.path)
    return OpenBase(stored, config, Tokenizer.open(stored.path), dtype_of(dtype))


class BaseSlot:
    """The owner of the one base in memory; another one takes its place."""

    def __init__(self, tiers: Tiers, *, device: torch.device) -> None:
        """Begin without a base."""
        self._tiers, self._device = tiers, device
        self._base: OpenBase | None = None
        self._loaded: LoadedBase | None = None

    def reserve(self, base: OpenBase) -> None:
        """Make room for a base, unless it is there.

        Raises:
            BudgetError: when it does not fit.
        """
        if self._base is not None and self._base.is_same(base):
            return
        self.drop()
        what = f"the base {base.stored.name}"
        self._tiers.reserve(Tier.DEVICE, "base", base.weight_bytes, what=what)
        self._base = base

    def load(self, *, progress: Progress = no_progress) -> LoadedBase:
        """Return the base that room was made for, reading its weights if they are absent.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        assert self._base is not None, "reserve comes first"
        if self._loaded is None:
            self._loaded = _load(self._base, self._device, progress)
        return self._loaded

    def drop(self) -> None:
        """Let go of the base."""
        if self._base is not None:
            size, self._base, self._loaded = self._base.weight_bytes, None, None
            self._tiers.release(Tier.DEVICE, "base", size)

    def check_integrity(self) -> None:
        """Assert that between runs a loaded base takes exactly what was reserved for it."""
        assert self._loaded is None or self._base is not None
        if self._loaded is not None and self._base is not None:
            assert self._loaded.nbytes == self._base.weight_bytes
            assert self._loaded.model.decoder.is_at_rest


def _load(base: OpenBase, device: torch.device, progress: Progress) -> LoadedBase:
    weights = load_base(
        base.stored.path, base.config, dtype=base.dtype, device=device, progress=progress
    )
    model = Model(Decoder(base.config, weights), base.tokenizer)
    return LoadedBase(model, weights.nbytes, weights.warnings)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that the matrices of a base are held in.

    Raises:
        UsageError: for a name that is not one of `DTYPES`.
    """
    if name not in DTYPES:
        message = f"dtype {name[:40]!r} is not one of {', '.join(DTYPES)}"
        raise UsageError(message, hint="--dtype float32 is the default")
    return DTYPES[name]
