"""One way to hold routed experts while a base is measured: how many have slots, which come first.

What was learnt of a base has no part in what is measured; a profile that is named has.
"""

from dataclasses import replace

from expertctl.engine.cuda_backend import CudaBackend
from expertctl.engine.loaded_base import OpenBase
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.guide import read_guide
from expertctl.engine.moe.pins import TopPins
from expertctl.engine.moe.start import Start, StartWishes
from expertctl.engine.packed_backend import PackedBackend
from expertctl.engine.packed_base import expert_shape
from expertctl.engine.routed_bench_result import Holding
from expertctl.errors import UsageError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.routing.request import MoeColdWish


def start_by(wishes: StartWishes, routed: ExpertsConfig) -> Start:
    """Return how each way to hold them begins.

    Raises:
        ExpertError: when a profile cannot be read, or is of another base.
        UsageError: when there is no profile by which to pin or exchange.
    """
    if wishes.profile is not None:
        return Start(wishes, read_guide(wishes.profile, routed))
    if wishes.pins is not None or wishes.exchange:
        option = "--moe-exchange" if wishes.pins is None else "--moe-pin"
        raise UsageError(
            f"{option}: by no profile; what was learnt of a base has no part in what is measured",
            hint="give --moe-profile FILE; `expertctl base profile export` writes what was learnt",
        )
    return Start(wishes)


def held(
    base: OpenBase, holding: Holding, start: Start, *, cap: float, cold: MoeColdWish
) -> PackedBackend | CudaBackend:
    """Return what holds so many experts of each layer, at least one.

    Raises:
        UsageError: when more are pinned than a layer has slots.
    """
    backend, config = base.backend, base.config
    assert isinstance(backend, PackedBackend | CudaBackend)
    assert config.experts is not None
    if holding.is_whole:
        return backend
    count = config.experts.count
    plan = CachePlan(
        layers=len(config.experts.layers),
        experts=count,
        slots=min(max(round(holding.share * count), 1), count),
        miss=holding.miss,
        cap=cap,
        cold=cold,
    )
    _demand_slots(start, plan, holding)
    if isinstance(backend, CudaBackend):
        return replace(backend, cache=plan).begun(lambda _: start)
    blocks = plan.blocks * expert_shape(config, backend.scheme).nbytes
    packed = replace(backend, cache=plan, weight_bytes=backend.least_bytes + blocks)
    return packed.begun(lambda _: start)


def _demand_slots(start: Start, plan: CachePlan, holding: Holding) -> None:
    pins = start.wishes.pins
    if isinstance(pins, TopPins) and pins.count > plan.slots:
        raise UsageError(
            f"--moe-pin {pins.count}: with {holding.share:.0%} resident a layer has "
            f"{plan.slots} slots",
            hint="pin fewer experts, or leave that share out of --resident",
        )
