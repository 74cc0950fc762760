"""What a person reads of routed experts: how many are kept, missed and left out."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertctl.engine.moe.report import RoutedReport


def routed_text(moe: "RoutedReport | None") -> Iterator[str]:
    """Say how many routed experts were missing and what that cost, if any could be."""
    if moe is None or moe.residence.is_whole:
        return
    did = moe.activity
    told = [f"room for {moe.residence.blocks} of {moe.residence.all}"]
    told += [f"{100 * moe.fallback_rate:.1f} % of requests missed"]
    told += [f"{did.lent} of {did.misses} computed in the file cache"] if did.lent else []
    told += [f"{did.waited_ms:.0f} ms waited"]
    skips = moe.residence.miss == "skip"
    told += [f"{100 * moe.skipped_mass:.1f} % of weights left out"] if skips else []
    yield f"routed experts: {', '.join(told)}"


def loss_text(moe: "RoutedReport | None") -> Iterator[str]:
    """Say how much was left out, if anything was, since that changes the answer."""
    if moe is not None and moe.skipped_mass:
        yield f"{100 * moe.skipped_mass:.2g} % of the weights of routed experts were left out"
