"""A base on its way into memory: its configuration and tokenizer first, its weights when needed.

What a prompt costs is known before the weights are read, so what cannot fit is refused at once.
Only `backend_of` decides what runs a base.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertctl.digest import Progress, no_progress
from expertctl.engine.backend import Backend, Model, Surroundings
from expertctl.engine.moe.cache_plan import fits_whole
from expertctl.engine.moe.start import StartOf, nowhere
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.tokenizer import Tokenizer
from expertctl.engine.torch_backend import TorchBackend
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, read_config
from expertctl.routing.numerics import SMALL_BASE
from expertctl.routing.request import (
    QUANTISED,
    AdapterDtype,
    DeviceName,
    Dtype,
    MoeColdWish,
    MoeMiss,
)
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

if TYPE_CHECKING:
    from expertctl.engine.packed_backend import PackedBackend

TORCH_BELOW = SMALL_BASE
"""A base of fewer bytes is run by torch, if it has no routed experts and torch can do it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a run wants its base and experts held, and whether it wants the same bits always."""

    dtype: Dtype = "float32"
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    device: DeviceName = "cpu"
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = 1.0
    moe_cold: MoeColdWish = "auto"
    room: int | None = None
    """Bytes of memory for all; routed experts that do not fit stay on the disk."""
    beside: int = 0
    """Bytes that a run is known to take besides the base; slots of routed experts leave them."""
    rows: int = 1
    """How many texts are read at once."""
    start: StartOf = nowhere
    """How routed experts begin where not all of them fit into memory."""

    @property
    def needs_kernels(self) -> bool:
        """Whether torch cannot do that, whatever the base is."""
        return self.dtype in QUANTISED or self.adapter_dtype != "published" or self.deterministic


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base whose files are those that were added; no weights are in memory."""

    stored: StoredBase
    tokenizer: Tokenizer
    backend: Backend
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """What its configuration says."""
        return self.backend.config

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""
        return self.backend.weight_bytes

    @property
    def context(self) -> int:
        """How many tokens it reads, with the answer."""
        return self.config.max_positions

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return self.backend.kv_bytes(tokens)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What reading the weights, and then a pass over so many tokens, needs besides."""
        passing = self.backend.buffer_bytes(tokens, width=width, rows=rows)
        return max(passing, self.backend.loading_bytes)

    def is_same(self, other: "OpenBase") -> bool:
        """Tell whether the weights of another base are these, held in the same way."""
        return self._held == other._held

    @property
    def _held(self) -> tuple[object, ...]:
        backend = self.backend
        held = backend.name, backend.dtype, backend.cache
        return self.stored.path, self.stored.identity, *held


def open_base(
    bases: BaseStore,
    stored: StoredBase,
    wish: Wish,
    *,
    rehash: bool,
    torch_below: int = TORCH_BELOW,
) -> OpenBase:
    """Check the files of a base, by every byte with ``rehash``, and read the small ones.

    Raises:
        BaseMismatchError: when they are not those that were added.
        IncompatibleError: when no decoder of ours supports such a model in such a dtype.
    """
    if rehash:
        bases.rehash(stored)
    else:
        bases.check(stored)
    backend, warnings = backend_of(read_config(stored.path), wish, torch_below=torch_below)
    return OpenBase(stored, Tokenizer.open(stored.path), backend, warnings)


def backend_of(
    config: ModelConfig, wish: Wish, *, torch_below: int = TORCH_BELOW
) -> tuple[Backend, tuple[str, ...]]:
    """Return what runs a base, and what a person should know of that.

    On a CUDA device there is one way. On a processor torch runs small bases. Kernels run large
    ones, those of routed experts, which are to answer with the same bits in any memory, and what
    torch cannot do. Where kernels do not support the sizes of a base, torch runs it; a warning says
    so if it is large, or if part of it would have to stay on the disk.

    Raises:
        IncompatibleError: when kernels do not support the sizes, nor torch what is wished.
    """
    if wish.device == "cuda":
        return _on_cuda(config, wish), ()
    if wish.needs_kernels:
        return _packed(config, wish).begun(wish.start), ()
    plain = TorchBackend(config, wish.dtype)
    is_small = plain.weight_bytes < torch_below
    if is_small and config.experts is None:
        return plain, ()
    try:
        packed = _packed(config, wish)
    except IncompatibleError as error:
        if is_small and fits_whole(plain.weight_bytes, wish.room):
            return plain, ()
        return plain, (f"torch runs the base, which takes longer: {error.message}",)
    return packed.begun(wish.start), ()


def _on_cuda(config: ModelConfig, wish: Wish) -> Backend:
    """Return the backend of captured steps; a wish that it cannot meet was refused before."""
    from expertctl.engine.cuda_backend import CudaBackend

    assert not wish.needs_kernels, "a CUDA device holds float32 and bf16, experts as published"
    return CudaBackend.of(
        config,
        wish.dtype,
        room=wish.room,
        miss=wish.moe_miss,
        cap=wish.moe_skip_cap,
        beside=wish.beside,
    ).begun(wish.start)


def _packed(config: ModelConfig, wish: Wish) -> "PackedBackend":
    """Return the kernels; only now numba is imported, which takes a third of a second."""
    from expertctl.engine.packed_backend import PackedBackend

    return PackedBackend.of(
        config,
        wish.dtype,
        wish.adapter_dtype,
        room=wish.room,
        miss=wish.moe_miss,
        cap=wish.moe_skip_cap,
        cold=wish.moe_cold,
        rows=wish.rows,
        beside=wish.beside,
    )


class BaseSlot:
    """The owner of the one base in memory; another one takes its place."""

    def __init__(self, tiers: Tiers, *, dropping: Callable[[], None] = lambda: None) -> None:
        """Begin without a base; ``dropping`` is called before one that is in memory goes."""
        self._tiers, self._dropping = tiers, dropping
        self._base: OpenBase | None = None
        self._model: Model | None = None
        self.read_bytes = 0
        """How many bytes of files were read for bases so far."""

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
        try:
            self._tiers.reserve(Tier.RAM, "base", base.backend.host_bytes, what=what)
        except BaseException:
            self._tiers.release(Tier.DEVICE, "base", base.weight_bytes)
            raise
        self._base = base

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return 0 if self._base is None else self._base.weight_bytes

    @property
    def is_loaded(self) -> bool:
        """Whether the weights of the base that room was made for are there."""
        return self._model is not None

    def load(self, around: Surroundings, *, progress: Progress = no_progress) -> Model:
        """Return the base that room was made for, reading its weights if they are absent.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        assert self._base is not None, "reserve comes first"
        if self._model is None:
            self._model = self._base.backend.load(around, progress=progress)
            self.read_bytes += self._model.read_bytes
        return self._model

    def drop(self) -> None:
        """Let go of the base."""
        model, self._model = self._model, None  # what is closed is not run again
        if model is not None:
            self._dropping()  # a watcher would keep its memory
            model.close()
        del model
        if self._base is not None:
            base, self._base = self._base, None
            self._tiers.release(Tier.DEVICE, "base", base.weight_bytes)
            self._tiers.release(Tier.RAM, "base", base.backend.host_bytes)

    def check_integrity(self) -> None:
        """Assert that between runs a loaded base takes exactly what was reserved for it."""
        assert self._model is None or self._base is not None
        if self._model is not None and self._base is not None:
            assert self._model.nbytes == self._base.weight_bytes
            assert self._model.is_at_rest
            self._model.check_integrity()
