"""What a traced run shows to a person: the time of each layer, and what a token allocates."""

from collections import defaultdict
from typing import TYPE_CHECKING

from expertctl.cli.output import human_size, table

if TYPE_CHECKING:
    from expertctl.engine.layer_times import LayerTimes
    from expertctl.engine.trace import Trace

_PARTS = ("attention", "mlp", "experts")
_TOGETHER = "what experts add is part of the time of their layers"
_Rows = dict[str, dict[str, float]]


def trace_text(trace: "Trace") -> str:
    """Return milliseconds of the prompt and of one token, by layer and by kind of operation."""
    tokens = max(trace.timed_steps, 1)
    parts = [_layers("A TOKEN, ms", trace.decode, tokens), _layers("PROMPT, ms", trace.prefill, 1)]
    if trace.prefill.kinds:
        parts.append(_kinds(trace.prefill, trace.decode, tokens))
    elif trace.prefill.places:
        parts.append(_TOGETHER)
    return "\n\n".join([*(part for part in parts if part), _allocations(trace)])


def _layers(title: str, times: "LayerTimes", passes: int) -> str:
    """Return a row for each layer, and for what comes before and after them."""
    rows = _by_row(times, passes)
    parts = [part for part in _PARTS if any(part in cells for cells in rows.values())]
    shown = [
        [name, *(_number(cells.get(part)) for part in parts), _number(sum(cells.values()))]
        for name, cells in rows.items()
    ]
    whole = [sum(cells.get(part, 0.0) for cells in rows.values()) for part in parts]
    shown.append(["all", *map(_number, whole), _number(times.seconds / passes * 1e3)])
    return table([title, *parts, "together"], shown) if rows else ""


def _by_row(times: "LayerTimes", passes: int) -> _Rows:
    """Sort places into rows: a layer by its parts, anything else by its name."""
    rows: _Rows = defaultdict(lambda: defaultdict(float))
    for place, seconds in times.places.items():
        name, _, rest = place.removeprefix("layers.").partition(".")
        part = "experts" if rest.endswith("experts") else rest
        rows[f"layer {name}" if place.startswith("layers.") else name][part] += (
            seconds / passes * 1e3
        )
    return rows


def _kinds(prompt: "LayerTimes", written: "LayerTimes", tokens: int) -> str:
    """Return what each kind of operation took, the longest first."""
    names = sorted(
        {*prompt.kinds, *written.kinds}, key=lambda name: (-written.kinds.get(name, 0.0), name)
    )
    rows = [
        [
            name,
            _number(written.kinds.get(name, 0.0) / tokens * 1e3),
            _number(prompt.kinds.get(name, 0.0) * 1e3),
        ]
        for name in names
    ]
    return table(["OPERATION", "A TOKEN, ms", "PROMPT, ms"], rows)


def _allocations(trace: "Trace") -> str:
    found = trace.to_json()["allocations"]
    assert isinstance(found, dict)
    if not found["tokens"]:
        return "allocations of a token were not counted: too few were written"
    python, native = (human_size(int(str(found[key]))) for key in ("python_bytes", "native_bytes"))
    return (
        f"a token allocates {python} in Python, {native} natively and "
        f"{found['compiled_arrays']} arrays in compiled code (medians of {found['tokens']})"
    )


def _number(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}"
