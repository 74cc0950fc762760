"""DoRA's gains on one base: computed at first use, then resident, and kept on the disk.

They belong to (package, base, dtype of the base): another base gets others. Their bytes are part of
the budget like an expert's, and so is the scratch memory while they are computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.digest import Digest
from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.compose import Form, Gains
from expertctl.engine.dora import DoraTensors, gains, scratch_bytes
from expertctl.engine.packed_delta import is_routed
from expertctl.engine.tiers import Tier, Wanted
from expertctl.routing.plan import NUMERIC_VERSION
from expertctl.store.derived import Derived

_FLOAT_BYTES = 4
_COPIES = 2
"""Their bytes on the way to the disk or from there."""
_UNPACKING = 16
"""Bytes for each number that is being unpacked, at most, besides the number itself."""
_UNPACKED_AT_ONCE = 1 << 17
_BLOCK = 16
"""Rows that are unpacked together, however wide they are; as `kernels.packed` does it."""
_Place = tuple[str, DoraTensors]


@dataclass(frozen=True, slots=True)
class GainSource:
    """What gains are computed from and kept in: one base in memory, by content and dtype."""

    base: Digest
    matrix: Callable[[str], Tensor]
    """The weights [out, in] of a linear layer by its module name."""
    derived: Derived

    def wanted(self, adapter: LoadedAdapter, package: Digest) -> Wanted[Gains]:
        """The request for one expert's gains in memory."""
        key = Digest.of(f"dora gains {NUMERIC_VERSION} {package} {self.base}".encode())
        return Wanted(
            key=(Tier.RAM, key),
            nbytes=gains_bytes(adapter),
            what=f"the gains of {adapter.ref}",
            load=lambda: self._load(adapter, package, key),
            traffic=False,
        )

    def _load(self, adapter: LoadedAdapter, package: Digest, key: Digest) -> Gains:
        sizes = _sizes(adapter)
        kept = self.derived.read(package, key, size=_FLOAT_BYTES * sum(sizes))
        if kept is not None:
            values = torch.frombuffer(bytearray(kept), dtype=torch.float32)
            return _by_module(adapter, values.split_with_sizes(sizes))
        values = torch.empty(sum(sizes))
        for (module, dora), part in zip(
            _places(adapter), values.split_with_sizes(sizes), strict=True
        ):
            what = f"{adapter.ref}: {module}"
            part.copy_(gains(self.matrix(module), dora, what=what))
        self.derived.write(package, key, values.numpy().tobytes())
        return _by_module(adapter, values.split_with_sizes(sizes))


def has_dora(adapter: LoadedAdapter) -> bool:
    """Tell whether an expert needs gains."""
    return any(True for _ in _places(adapter))


def gains_bytes(adapter: LoadedAdapter) -> int:
    """Return what the gains of one expert take."""
    return _FLOAT_BYTES * sum(_sizes(adapter))


def outlined_gains(adapter: LoadedAdapter) -> Gains:
    """Return gains of the right shapes that were never computed."""
    sizes = _sizes(adapter)
    return _by_module(adapter, torch.empty(sum(sizes)).split_with_sizes(sizes))


def gains_scratch(adapter: LoadedAdapter, form: Form | None = None) -> int:
    """Return what bringing the gains of one expert into memory needs besides them, at most."""
    each = (_while_computing(module, dora, form) for module, dora in _places(adapter))
    return max(each, default=0) + _COPIES * gains_bytes(adapter)


def _while_computing(module: str, dora: DoraTensors, form: Form | None) -> int:
    """Return what one layer takes; packed weights are unpacked before they are looked at."""
    merging = scratch_bytes(dora)
    if form is None or form.packing is None or module not in form.shapes:
        return merging + _copied(module, form)
    out, inputs = form.shapes[module]
    at_once = min(max(_UNPACKED_AT_ONCE, _BLOCK * inputs), (out + _BLOCK) * inputs)
    read = form.routed_bytes if is_routed(module) else 0
    return read + _FLOAT_BYTES * out * inputs + max(merging, _UNPACKING * at_once)


def _copied(module: str, form: Form | None) -> int:
    """Return what a layer takes that is copied from a device to be read."""
    if form is None or form.device.type == "cpu" or module not in form.shapes:
        return 0
    out, inputs = form.shapes[module]
    return _FLOAT_BYTES * out * inputs


def _places(adapter: LoadedAdapter) -> Iterator[_Place]:
    for module, steps in adapter.modules.items():
        yield from ((module, step) for step in steps if isinstance(step, DoraTensors))


def _sizes(adapter: LoadedAdapter) -> list[int]:
    return [len(dora.b) for _, dora in _places(adapter)]


def _by_module(adapter: LoadedAdapter, parts: tuple[Tensor, ...]) -> Gains:
    found: dict[str, tuple[Tensor, ...]] = {}
    for (module, _), part in zip(_places(adapter), parts, strict=True):
        found[module] = (*found.get(module, ()), part)
    return found
