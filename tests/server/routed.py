"""A base of routed experts and how it is served in less memory than it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertctl.engine.moe.start import USUAL, StartWishes
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.server.settings import ServeSettings
from tests.factories import write_base
from tests.server.served import BASE, Served, serving
from tests.store.shop import House

LAYERS, EXPERTS, USED = 3, 24, 2
BUDGET = 64 << 20
"""Less than the base takes, which is mostly experts of 885 KB in float32."""


def write_routed(folder: Path) -> Path:
    """Write it: layer 0 is dense, the others have routed experts."""
    return write_base(
        folder,
        arch="qwen3_moe",
        tie=False,
        seed=2,
        layers=LAYERS + 1,
        hidden=64,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        moe_intermediate_size=1152,
        mlp_only_layers=[0],
    )


@contextmanager
def serving_routed(
    root: Path, budget: int = BUDGET, *, moe: StartWishes = USUAL, warm: tuple[str, ...] = ()
) -> Iterator[Served]:
    """Serve it, with nothing else in the home."""
    house = House(root)
    house.bases.add(write_routed(root.parent / "routed"), name=BASE)
    batch = BatchSettings(budget=budget, rows=2, moe=moe, warm=warm)
    with serving(house, ServeSettings(batch=batch)) as one:
        yield one
