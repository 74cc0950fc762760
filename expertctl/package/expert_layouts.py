"""The layouts in which files hold routed experts: each matrix apart, or those of a layer stacked.

In either layout, each matrix of each expert becomes a tensor of its own: a range of rows of what is
stored. So the digest of a base, its loading and reading some rows do not depend on the layout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.module_names import canonical_name
from expertctl.package.tensor_file import TensorInfo

_STACK = re.compile(
    r"(?P<experts>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.mlp\.experts)"
    r"\.(?P<kind>gate_up|down)_proj"
)
_WAYS = {
    "stacked": re.compile(r".*\.experts\.(gate_up_proj|down_proj)"),
    "as w1, w2 and w3": re.compile(r".*\.experts\.[0-9]+\.w[123]\.weight"),
    "each matrix apart": re.compile(r".*\.experts\.[0-9]+\.(gate|up|down)_proj\.weight"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: a whole stored tensor, or some of its rows."""

    stored: str
    row: int
    """The first of its rows, where a stack counts as one matrix."""
    info: TensorInfo


def canonical_sources(
    infos: Mapping[str, TensorInfo], experts: ExpertsConfig, *, hidden: int, problems: list[str]
) -> dict[str, Source]:
    """Return every tensor by our name for it; what is contradictory goes to ``problems``."""
    problems += _mixed(infos)
    sources: dict[str, Source] = {}
    for stored, info in infos.items():
        for name, source in _parts(stored, info, experts, hidden, problems):
            if name in sources:
                problems.append(f"{name}: it is there as {sources[name].stored} and as {stored}")
            sources[name] = source
    return sources


def _mixed(infos: Mapping[str, TensorInfo]) -> list[str]:
    """All experts of a base are stored in one layout; with two, some would be stored twice."""
    firsts = {
        way: next((name for name in infos if pattern.fullmatch(name)), None)
        for way, pattern in _WAYS.items()
    }
    found = [f"{way} ({first})" for way, first in firsts.items() if first is not None]
    return [f"experts are stored {' and '.join(found)}; one way is needed"] if found[1:] else []


def _parts(
    stored: str, info: TensorInfo, experts: ExpertsConfig, hidden: int, problems: list[str]
) -> Iterator[tuple[str, Source]]:
    name = canonical_name(stored)
    match = _STACK.fullmatch(name)
    if match is None or int(match["layer"]) not in experts.layers:
        yield name, Source(stored, 0, info)  # the stack of a layer that is not there stays whole
        return
    inner = experts.intermediate_size
    halves = {"gate_proj": inner, "up_proj": inner} if match["kind"] == "gate_up" else {}
    rows, columns = (halves, hidden) if halves else ({"down_proj": hidden}, inner)
    wanted = (experts.count, sum(rows.values()), columns)
    if info.shape != wanted:
        problems.append(f"tensor {stored} is {list(info.shape)}, {list(wanted)} by config.json")
        return
    row_bytes = (info.end - info.begin) // (wanted[0] * wanted[1])
    first = 0
    for number in range(experts.count):
        for module, count in rows.items():
            begin = info.begin + first * row_bytes
            part = TensorInfo(info.dtype, (count, columns), begin, begin + count * row_bytes)
            yield f"{match['experts']}.{number}.{module}.weight", Source(stored, first, part)
            first += count
