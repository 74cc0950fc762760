"""Read and write usage profiles, in two formats.

*Activity documents* count tokens; they are also telemetry. Their format is that of llama.cpp's hot
cache, so profiles can be exchanged with it in both directions. The *full* schema has all times, the
*update* schema only what swapping experts needs; a run that observes nothing always writes the same
bytes. Missed requests, swaps and the number of prompts are our additions, which other readers skip.
Reading drops zero counts, adds the counts of an expert that is listed twice and sorts layers. Hot
and cold counts override raw ones. A layer whose number is not an integer is ignored, as in
llama.cpp.

*Prompt counts*, the format of flash-moe, say in how many prompts each expert of a layer was
activated. Tokens are written as if each was a prompt.

Everything else that is malformed is refused, and sizes are bounded. Documents may be large, so they
are parsed once, checked against their schema and then converted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from expertctl.engine.moe.counters import CounterMode
from expertctl.engine.moe.usage_profile import (
    TIMES,
    Counts,
    LaneTimes,
    LayerUsage,
    UsageProfile,
    build_prompt_profile,
    cap_count,
    make_time_key,
)
from expertctl.errors import InvalidPackageError, StoreError
from expertctl.files import open_regular_file
from expertctl.package.architectures import ExpertsConfig
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document, find_problems

MAX_BYTES = 16 << 20
MAX_EXPERTS = 1024
MAX_LAYERS = 1024
DEFAULT_THRESHOLD = 0.5
"""The share of prompts that makes an expert universal in prompt counts that are written."""
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
FALLBACK_REASONS = (
    *("incomplete", "count_not_prefix", "bad_split_order", "same_backend", "hot_spans"),
    *("cold_spans", "hot_not_cuda", "cold_not_cpu", "count_readback", "threshold"),
    *("zero_output", "other"),
)
"""Reasons why the lanes of a layer ran one after the other."""
LANE_TIMES = ("parallel_hot_lane_wall", "parallel_cold_lane_wall", "parallel_join_wait")
"""The times of the update schema."""


def read_activity(data: bytes, *, what: str) -> UsageProfile:
    """Read a document of either schema.

    Raises:
        InvalidPackageError: when it is not one, malformed or too large.
    """
    return parse_activity(load_document(data, what=what), what=what)


def parse_activity(document: JsonObject, *, what: str) -> UsageProfile:
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
    return UsageProfile(
        "off" if fields.mode == "off" else mode,
        tuple(sorted(layers, key=lambda layer: layer.layer)),
        experts=fields.n_expert,
        used=fields.n_expert_used,
        updates=fields.updates,
        overflow_resets=fields.overflow_resets,
        prompts=fields.num_prompts,
        preset=fields.prompt_preset,
        source=what,
    )


def write_activity(profile: UsageProfile) -> bytes:
    """Return a profile as an activity document, in JSON."""
    written = activity_to_json(profile)
    return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()


def activity_to_json(profile: UsageProfile) -> JsonObject:
    """Return a profile as an activity document."""
    if profile.mode == "off":
        return {"enabled": False, "mode": "off", "schema": UPDATE_SCHEMA, "layers": []}
    prompts: JsonObject = {
        "num_prompts": cap_count(profile.prompts),
        "prompt_preset": profile.preset,
    }
    return {
        "enabled": True,
        "mode": profile.mode,
        "schema": FULL_SCHEMA if profile.mode == "full" else UPDATE_SCHEMA,
        "n_expert": profile.experts,
        "n_expert_used": profile.used,
        "updates": cap_count(profile.updates),
        "overflow_resets": cap_count(profile.overflow_resets),
        **(prompts if profile.prompts else {}),
        "summary": _summary_json(profile),
        "layers": [_layer_json(layer, profile.mode) for layer in profile.layers],
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


class _LayerFields(msgspec.Struct):
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


def _find_invalid_numbers(layers: Iterable[LayerUsage], experts: int) -> Iterator[str]:
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


def _parse_layer(document: Mapping[str, object], what: str) -> LayerUsage:
    record = decode_record(document, _LayerFields, what=what)
    hot, cold = _parse_counts(record.hot_experts), _parse_counts(record.cold_experts)
    counts = record.parallel_fallback_reasons
    return LayerUsage(
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


def _summary_json(profile: UsageProfile) -> JsonObject:
    """Return totals of all layers, and the average times of a call of a layer."""
    calls = sum(layer.calls for layer in profile.layers)
    hot = sum(sum(layer.hot.values()) for layer in profile.layers)
    slots = hot + sum(sum(layer.cold.values()) for layer in profile.layers)
    totals = {
        "hot": hot,
        "hot1": sum(layer.hot1_slots for layer in profile.layers),
        "hot2": sum(layer.hot2_slots for layer in profile.layers),
    }
    summary: JsonObject = {"layer_calls": cap_count(calls), "hot_slot_ratio": _ratio(hot, slots)}
    for name, total in totals.items():
        summary[f"{name}_slots_total"] = cap_count(total)
        summary[f"{name}_slots_per_call"] = _ratio(total, calls)
    requests = sum(layer.requests for layer in profile.layers)
    missed = sum(layer.missed_requests for layer in profile.layers)
    swaps = sum(layer.swaps for layer in profile.layers)
    summary |= _miss_json(requests, missed, swaps)
    for name in _list_times(profile.mode):
        total = sum(getattr(layer.times, name) * layer.calls for layer in profile.layers)
        summary[make_time_key(name)] = _ratio(total, calls)
    if profile.mode == "full":
        summary["parallel_fallbacks"] = cap_count(sum(layer.fallbacks for layer in profile.layers))
    return summary


def _layer_json(layer: LayerUsage, mode: CounterMode) -> JsonObject:
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
        record[make_time_key(name)] = getattr(layer.times, name)
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


def parse_prompt_counts(document: JsonObject, *, what: str) -> UsageProfile:
    """Return the profile of a document of prompt counts.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    read = parse_document(document, _PromptCountFields, what=what, schema="moe-profile")
    layers = {
        int(layer): {int(e): n for e, n in sorted(record.activation_counts.items()) if n}
        for layer, record in read.layers.items()
    }
    if problems := list(_find_invalid_counts(read, layers)):
        raise InvalidPackageError(what, problems)
    found = build_prompt_profile(
        layers, experts=read.num_experts, prompts=read.num_prompts, preset=read.prompt_preset
    )
    return replace(found, source=what)


def write_prompt_counts(profile: UsageProfile, *, experts: int, model: str) -> bytes:
    """Return the profile of a model with so many experts in a layer as prompt counts, in JSON."""
    document = {
        "model": model,
        "num_prompts": profile.tokens,
        "threshold": DEFAULT_THRESHOLD,
        "capacity": 0,
        "num_experts": experts,
        "moe_layers": len(profile.counts),
        "prompt_preset": profile.counted_preset,
        "layers": {
            str(layer): {
                "universal": profile.list_universal(layer, DEFAULT_THRESHOLD),
                "activation_counts": {str(expert): count for expert, count in counts.items()},
                "total_unique": len(counts),
            }
            for layer, counts in profile.counts.items()
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class _PromptCountLayer(msgspec.Struct):
    activation_counts: dict[str, int]


class _PromptCountFields(msgspec.Struct):
    num_prompts: int
    num_experts: int
    layers: dict[str, _PromptCountLayer]
    prompt_preset: str = ""


def _find_invalid_counts(read: _PromptCountFields, layers: Mapping[int, Counts]) -> Iterator[str]:
    """Yield what a schema cannot say: experts that do not exist, counts beyond all prompts."""
    for layer, counts in layers.items():
        if (highest := max(counts, default=0)) >= read.num_experts:
            yield f"layers/{layer}: expert {highest} of only {read.num_experts}"
        if (most := max(counts.values(), default=0)) > read.num_prompts:
            yield f"layers/{layer}: activated by {most} of {read.num_prompts} prompts"


_PROMPT_COUNT_FIELDS = {"num_prompts", "num_experts", "layers"}
"""Fields of prompt counts; a document without any of them is of another format."""
_HINT = "name a profile: `expertctl base profile export` writes one"


def read_profile(path: Path, routed: ExpertsConfig) -> UsageProfile:
    """Read a file of either format, for a base.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is neither, malformed or too large.
        IncompatibleError: when it is of another base, or counts no expert.
    """
    with open_profile(path) as stream:
        document = load_document(stream.read(MAX_BYTES + 1), what=str(path))
        profile = parse_profile(document, routed, what=str(path))
        profile.require_counts()
        return profile


@contextmanager
def open_profile(path: Path) -> Iterator[BinaryIO]:
    """Open a profile, to read it or only to check that this is possible.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is not a regular file, or its contents are malformed.
    """
    try:
        with open_regular_file(path) as stream:
            yield stream
    except OSError as error:
        fact = f"{path} cannot be read: {error.strerror or error}"
        raise StoreError(fact, hint="name a file that this user may read") from error
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error


def parse_profile(document: JsonObject, routed: ExpertsConfig, *, what: str) -> UsageProfile:
    """Convert a document of either format, for a base.

    Raises:
        InvalidPackageError: when it is neither, or malformed.
        IncompatibleError: when it is of another base.
    """
    try:
        if "schema" in document:
            profile = parse_activity(document, what=what)
        elif not _PROMPT_COUNT_FIELDS & document.keys():
            neither = "it is neither an activity document (schema) nor a profile (num_prompts)"
            raise InvalidPackageError(what, [neither])
        else:
            profile = parse_prompt_counts(document, what=what)
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error
    profile.check_fits(routed)
    return profile
