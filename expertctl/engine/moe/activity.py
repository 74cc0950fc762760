"""Activity documents: how often each routed expert was chosen, and what that took, as JSON.

An `ActivityDocument` is both a usage profile to plan from and telemetry. The format is that of
llama.cpp's hot cache, so profiles can be exchanged with it in both directions. Its *full* schema
has all times, its *update* schema only what swapping experts needs; a run that observes nothing
always writes the same bytes. Missed requests, swaps and the number of prompts are our additions,
which other readers skip.

Reading drops zero counts, adds the counts of an expert that is listed twice and sorts layers. Hot
and cold counts override raw ones. A layer whose number is not an integer is ignored, as in
llama.cpp. Everything else that is malformed is refused, and sizes are bounded. Documents may be
large, so they are parsed once, checked against their schema and then converted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from expertctl.engine.moe.counters import CounterMode
from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document, find_problems

MAX_BYTES = 16 << 20
_Kind = TypeVar("_Kind")


def load_document(data: bytes, *, what: str) -> JsonObject:
    """Parse a JSON object of at most 16 MiB.

    Raises:
        InvalidPackageError: when it is not one, or is too large.
    """
    return load_object(data, what=what, max_bytes=MAX_BYTES)


def parse_document(document: JsonObject, kind: type[_Kind], *, what: str, schema: str) -> _Kind:
    """Convert an object to ``kind`` after checking it against a schema.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    if problems := find_problems(document, schema):
        raise InvalidPackageError(what, problems)
    return decode_record(document, kind, what=what)


def decode_record(document: object, kind: type[_Kind], *, what: str) -> _Kind:
    """Convert a document to ``kind``; a schema accepts 4.0 as an integer, this does not.

    Raises:
        InvalidPackageError: when it does not fit ``kind``.
    """
    try:
        return convert_document(document, kind)
    except msgspec.ValidationError as error:
        raise InvalidPackageError(what, [str(error)]) from error


FULL_SCHEMA = "llama.cpp.moe_layer_perf.v1"
UPDATE_SCHEMA = "llama.cpp.moe_layer_opt_perf.v1"
MAX_EXPERTS = 1024
MAX_LAYERS = 1024
MAX_JSON_INTEGER = 2**53 - 1
"""Largest integer that every JSON reader represents exactly; larger counts are written as this."""
FALLBACK_REASONS = (
    *("incomplete", "count_not_prefix", "bad_split_order", "same_backend", "hot_spans"),
    *("cold_spans", "hot_not_cuda", "cold_not_cpu", "count_readback", "threshold"),
    *("zero_output", "other"),
)
"""Reasons why the lanes of a layer ran one after the other."""
Counts = Mapping[int, int]
"""How often each expert was chosen; never 0."""


def cap_count(count: int) -> int:
    """Return a count that every JSON reader represents exactly."""
    return min(count, MAX_JSON_INTEGER)


def _time_key(name: str) -> str:
    return f"{name}_time_per_call_us"


class LaneTimes(msgspec.Struct, frozen=True, rename=_time_key):
    """Microseconds per call of a layer; 0 if not measured."""

    total_moe: float = 0.0
    routing: float = 0.0
    worklist: float = 0.0
    merge: float = 0.0
    hot_gate: float = 0.0
    hot_up: float = 0.0
    hot_down: float = 0.0
    cold_gate: float = 0.0
    cold_up: float = 0.0
    cold_down: float = 0.0
    parallel_region_wall: float = 0.0
    parallel_hot_lane_wall: float = 0.0
    parallel_cold_lane_wall: float = 0.0
    parallel_join_wait: float = 0.0


TIMES = LaneTimes.__struct_fields__
LANE_TIMES = ("parallel_hot_lane_wall", "parallel_cold_lane_wall", "parallel_join_wait")
"""The times of the update schema."""


@dataclass(frozen=True, slots=True)
class LayerActivity:
    """The choices of one layer, and what they took.

    ``raw`` holds counts not known to be hot or cold: empty if ``hot`` or ``cold`` is not.
    """

    layer: int
    calls: int = 0
    hot: Counts = field(default_factory=dict)
    cold: Counts = field(default_factory=dict)
    raw: Counts = field(default_factory=dict)
    cold_per_call: float = 0.0
    hot1_slots: int = 0
    hot2_slots: int = 0
    """Hot slots that the second and the third lane computed; ``hot`` includes them."""
    requests: int = 0
    """Experts that calls chose, each counted once per call."""
    missed_requests: int = 0
    """Those of them that were not hot."""
    swaps: int = 0
    """How often an expert took the slot of another."""
    times: LaneTimes = field(default_factory=LaneTimes)
    fallbacks: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> dict[int, int]:
        """How often each expert was chosen, hot or not."""
        if not (self.hot or self.cold):
            return dict(self.raw)
        experts = sorted({*self.hot, *self.cold})
        return {expert: self.hot.get(expert, 0) + self.cold.get(expert, 0) for expert in experts}

    @property
    def pressure(self) -> float:
        """How much a call suffers from cold experts.

        The first of these that is above zero: the wait of the call, how much longer its cold lane
        takes than its hot one, its cold slots.
        """
        times = self.times
        behind = times.parallel_cold_lane_wall - times.parallel_hot_lane_wall
        return next((p for p in (times.parallel_join_wait, behind, self.cold_per_call) if p > 0), 0)


@dataclass(frozen=True, slots=True)
class ActivityDocument:
    """The activity of all layers of a base."""

    mode: CounterMode
    layers: tuple[LayerActivity, ...] = ()
    experts: int = 0
    """Of each layer; 0 if the document does not say."""
    used: int = 0
    updates: int = 0
    overflow_resets: int = 0
    prompts: int = 0
    """Prompts that were counted, with the tokens of added documents; 0 if only tokens."""
    preset: str = ""
    """Which prompts these were."""

    @property
    def is_usable(self) -> bool:
        """Whether an expert was chosen at all, so that a placement can be planned from it."""
        return any(layer.hits for layer in self.layers)


def read_activity(data: bytes, *, what: str) -> ActivityDocument:
    """Read a document of either schema.

    Raises:
        InvalidPackageError: when it is not one, malformed or too large.
    """
    return parse_activity(load_document(data, what=what), what=what)


def parse_activity(document: JsonObject, *, what: str) -> ActivityDocument:
    """Convert a parsed document of either schema.

    Raises:
        InvalidPackageError: when it is not one, or malformed.
    """
    fields = parse_document(document, _ActivityFields, what=what, schema="moe-activity")
    numbered = [record for record in fields.layers if _is_number(record.get("layer"))]
    layers = [_parse_layer(record, what) for record in numbered]
    if problems := list(_find_invalid_numbers(layers, fields.n_expert or MAX_EXPERTS)):
        raise InvalidPackageError(what, problems)
    mode: CounterMode = "full" if fields.schema == FULL_SCHEMA else "update"
    return ActivityDocument(
        "off" if fields.mode == "off" else mode,
        tuple(sorted(layers, key=lambda layer: layer.layer)),
        experts=fields.n_expert,
        used=fields.n_expert_used,
        updates=fields.updates,
        overflow_resets=fields.overflow_resets,
        prompts=fields.num_prompts,
        preset=fields.prompt_preset,
    )


def write_activity(document: ActivityDocument) -> bytes:
    """Return the document as JSON."""
    written = activity_to_json(document)
    return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()


def activity_to_json(document: ActivityDocument) -> JsonObject:
    """Return the document as a JSON object."""
    if document.mode == "off":
        return {"enabled": False, "mode": "off", "schema": UPDATE_SCHEMA, "layers": []}
    prompts: JsonObject = {
        "num_prompts": cap_count(document.prompts),
        "prompt_preset": document.preset,
    }
    return {
        "enabled": True,
        "mode": document.mode,
        "schema": FULL_SCHEMA if document.mode == "full" else UPDATE_SCHEMA,
        "n_expert": document.experts,
        "n_expert_used": document.used,
        "updates": cap_count(document.updates),
        "overflow_resets": cap_count(document.overflow_resets),
        **(prompts if document.prompts else {}),
        "summary": _summary_json(document),
        "layers": [_layer_json(layer, document.mode) for layer in document.layers],
    }


class _ActivityFields(msgspec.Struct):
    schema: str
    layers: list[dict[str, object]]
    mode: str = ""
    n_expert: int = 0
    n_expert_used: int = 0
    updates: int = 0
    overflow_resets: int = 0
    num_prompts: int = 0
    prompt_preset: str = ""


class _LayerActivityFields(msgspec.Struct):
    layer: int
    calls: int = 0
    cold_slots_total: int = 0
    cold_slots_per_call: float = 0.0
    hot1_slots_total: int = 0
    hot2_slots_total: int = 0
    requests: int = 0
    missed_requests: int = 0
    swaps: int = 0
    parallel_fallbacks: int = 0
    parallel_fallback_reasons: dict[str, int] = msgspec.field(default_factory=dict)
    experts: list[tuple[int, int]] = msgspec.field(default_factory=list)
    hot_experts: list[tuple[int, int]] = msgspec.field(default_factory=list)
    cold_experts: list[tuple[int, int]] = msgspec.field(default_factory=list)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _find_invalid_numbers(layers: Iterable[LayerActivity], experts: int) -> Iterator[str]:
    """Yield what a schema cannot check: duplicate or impossible layers, unknown experts.

    More missed requests than requests are wrong, too.
    """
    seen = set[int]()
    for layer in layers:
        if layer.layer in seen:
            yield f"layer {layer.layer} appears twice"
        if not 0 <= layer.layer < MAX_LAYERS:
            yield f"layer {layer.layer} is not from 0 to {MAX_LAYERS - 1}"
        seen.add(layer.layer)
        if (highest := max(layer.hits, default=0)) >= experts:
            yield f"layer {layer.layer}: expert {highest} of only {experts}"
        missed, requests = layer.missed_requests, layer.requests
        if missed > requests:
            yield f"layer {layer.layer}: {missed} of {requests} requests missed"


def _parse_layer(document: Mapping[str, object], what: str) -> LayerActivity:
    record = decode_record(document, _LayerActivityFields, what=what)
    hot, cold = _parse_counts(record.hot_experts), _parse_counts(record.cold_experts)
    counts = record.parallel_fallback_reasons
    return LayerActivity(
        layer=record.layer,
        calls=record.calls,
        hot=hot,
        cold=cold,
        raw={} if hot or cold else _parse_counts(record.experts),
        cold_per_call=record.cold_slots_per_call or _ratio(record.cold_slots_total, record.calls),
        hot1_slots=record.hot1_slots_total,
        hot2_slots=record.hot2_slots_total,
        requests=record.requests,
        missed_requests=record.missed_requests,
        swaps=record.swaps,
        times=decode_record(document, LaneTimes, what=what),
        fallbacks=record.parallel_fallbacks,
        reasons={reason: counts[reason] for reason in FALLBACK_REASONS if counts.get(reason)},
    )


def _parse_counts(pairs: Iterable[tuple[int, int]]) -> Counts:
    counts: dict[int, int] = {}
    for expert, count in pairs:
        if count:
            counts[expert] = cap_count(counts.get(expert, 0) + count)
    return dict(sorted(counts.items()))


def _summary_json(document: ActivityDocument) -> JsonObject:
    """Return totals of all layers, and the average times of a call of a layer."""
    calls = sum(layer.calls for layer in document.layers)
    hot = sum(sum(layer.hot.values()) for layer in document.layers)
    slots = hot + sum(sum(layer.cold.values()) for layer in document.layers)
    totals = {
        "hot": hot,
        "hot1": sum(layer.hot1_slots for layer in document.layers),
        "hot2": sum(layer.hot2_slots for layer in document.layers),
    }
    summary: JsonObject = {"layer_calls": cap_count(calls), "hot_slot_ratio": _ratio(hot, slots)}
    for name, total in totals.items():
        summary[f"{name}_slots_total"] = cap_count(total)
        summary[f"{name}_slots_per_call"] = _ratio(total, calls)
    requests = sum(layer.requests for layer in document.layers)
    missed = sum(layer.missed_requests for layer in document.layers)
    swaps = sum(layer.swaps for layer in document.layers)
    summary |= _miss_json(requests, missed, swaps)
    for name in _list_times(document.mode):
        total = sum(getattr(layer.times, name) * layer.calls for layer in document.layers)
        summary[_time_key(name)] = _ratio(total, calls)
    if document.mode == "full":
        summary["parallel_fallbacks"] = cap_count(sum(layer.fallbacks for layer in document.layers))
    return summary


def _layer_json(layer: LayerActivity, mode: CounterMode) -> JsonObject:
    hot, cold = sum(layer.hot.values()), sum(layer.cold.values())
    record: JsonObject = {
        "layer": layer.layer,
        "calls": cap_count(layer.calls),
        "hot_slots_total": cap_count(hot),
        "cold_slots_total": cap_count(cold),
        "hot_slots_per_call": _ratio(hot, layer.calls),
        "cold_slots_per_call": layer.cold_per_call or _ratio(cold, layer.calls),
        "hot_slot_ratio": _ratio(hot, hot + cold),
        "hot1_slots_total": cap_count(layer.hot1_slots),
        "hot2_slots_total": cap_count(layer.hot2_slots),
        **_miss_json(layer.requests, layer.missed_requests, layer.swaps),
    }
    for name in _list_times(mode):
        record[_time_key(name)] = getattr(layer.times, name)
    if mode == "full":
        record["parallel_fallbacks"] = cap_count(layer.fallbacks)
        record["parallel_fallback_reasons"] = dict(layer.reasons)
    record["experts"] = _counts_json(layer.hits)
    record["hot_experts"] = _counts_json(layer.hot)
    record["cold_experts"] = _counts_json(layer.cold)
    return record


def _miss_json(requests: int, missed: int, swaps: int) -> JsonObject:
    return {
        "requests": cap_count(requests),
        "missed_requests": cap_count(missed),
        "fallback_rate": _ratio(missed, requests),
        "swaps": cap_count(swaps),
    }


def _list_times(mode: CounterMode) -> tuple[str, ...]:
    return TIMES if mode == "full" else LANE_TIMES


def _counts_json(counts: Counts) -> JsonValue:
    return [[expert, cap_count(count)] for expert, count in sorted(counts.items()) if count]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
