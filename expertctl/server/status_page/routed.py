"""What the status page shows of routed experts: room in memory, hits and misses."""

from expertctl.engine.serving.snapshot import Snapshot
from expertctl.schema.strict_json import JsonObject, JsonValue


def routed(now: Snapshot) -> JsonObject | None:
    """Return the ``routed`` object; None if the base has no routed experts.

    Layers are listed only while they are counted, which `/moe` may turn off.
    """
    if now.routed is None:
        return None
    residence, did = now.routed.residence, now.routed.activity
    return {
        "miss": residence.miss,
        "cold": residence.cold,
        "experts": residence.all,
        "whole": residence.is_whole,
        "in_memory": residence.blocks,
        "loads": did.loads,
        "read_bytes": did.read_bytes,
        "waited": did.waited_ms / 1e3,
        "mass": did.mass,
        "skipped": did.skipped,
        "layers": _layers(now, experts=residence.experts),
    }


def _layers(now: Snapshot, *, experts: int) -> list[JsonValue]:
    if now.observed is None or now.observed.mode == "off":
        return []
    return [
        {
            "layer": number,
            "hits": layer.hits,
            "misses": layer.misses,
            "swaps": layer.swaps,
            "resident": now.residents.get(number, experts),
            "experts": experts,
        }
        for number, layer in now.observed.layers.items()
    ]
