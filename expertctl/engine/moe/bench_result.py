"""Results of a benchmark of routed experts: rates of tokens, and hit rates of experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.bench_result import Spread, TimingSeries
from expertctl.engine.moe.counters import CounterSnapshot, LayerCounts, RoutedExpertStats
from expertctl.engine_config import COLD_START, MoeColdOption, MoeMiss, WarmupConfig
from expertctl.schema.strict_json import JsonObject, JsonValue

ALL_RESIDENT = "all resident"
Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ResidencyCase:
    """The share of the experts of each layer that has slots, and the miss policy for others."""

    share: float
    miss: MoeMiss = "exact"

    @property
    def is_whole(self) -> bool:
        """Whether no expert can be missing."""
        return self.share >= 1

    @property
    def label(self) -> str:
        """Its name in the results."""
        return ALL_RESIDENT if self.is_whole else f"{100 * self.share:.0f} % resident, {self.miss}"


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters after ``tokens`` decoded tokens."""

    tokens: int
    counters: CounterSnapshot


@dataclass(frozen=True, slots=True)
class HitRateTimeline:
    """The share of hot routed slots of each layer, from one sample to the next."""

    tokens: tuple[int, ...]
    """Where each column ends; it starts where the one before ends, the first at 0."""
    layers: tuple[int, ...]
    rates: Shares
    """[layers, columns]; NaN if no token ran the layer."""

    @classmethod
    def from_samples(cls, moments: Sequence[CounterSample]) -> "HitRateTimeline":
        """Return the timeline of samples; the first one is the start."""
        layers = tuple(moments[0].counters.layers) if moments else ()
        each = [[moment.counters.layers[layer] for moment in moments] for layer in layers]
        counts = [[(found.hits, found.misses) for found in row] for row in each]
        grown = np.diff(np.array(counts, np.float64).reshape(len(layers), len(moments), 2), axis=1)
        slots = grown.sum(-1)
        rates = np.divide(grown[..., 0], slots, out=np.full_like(slots, np.nan), where=slots > 0)
        return cls(tuple(m.tokens for m in moments[1:]), layers, rates)

    def to_json(self) -> JsonObject:
        """Return a JSON object with a row for each layer; null if no token ran it."""
        rows = [list[JsonValue](map(_nan_to_none, row)) for row in self.rates.tolist()]
        return {
            "tokens": list[JsonValue](self.tokens),
            "layers": list[JsonValue](self.layers),
            "hit_rates": list[JsonValue](rows),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBenchRow:
    """The result of one case; counts exclude the round that filled the slots."""

    case: ResidencyCase
    steps: TimingSeries
    prompts: tuple[tuple[int, float], ...]
    """Tokens of each prompt, and the seconds of its prefill."""
    report: RoutedExpertStats
    """Of the rounds that count."""
    layers: dict[int, LayerCounts]
    """Of these rounds, too; empty if nothing is counted."""
    timeline: HitRateTimeline
    """Of all rounds."""
    first_counted_token: int
    """Tokens that had been decoded when rounds began to count."""
    prefill_wait_ms: float
    """How long prefills waited for experts."""
    memory: int
    """Bytes of the weights and of all blocks for experts."""

    @property
    def decode_rate(self) -> Spread:
        """Decoded tokens per second."""
        return self.steps.rate(1)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return sum(tokens for tokens, _ in self.prompts) / sum(s for _, s in self.prompts)

    @property
    def written_tokens(self) -> int:
        """The number of decoded tokens."""
        return sum(map(len, self.steps.rounds))

    @property
    def waited_ms_per_token(self) -> float:
        """How long each decoded token waited for experts."""
        waited = self.report.activity.waited_ms - self.prefill_wait_ms
        return waited / self.written_tokens if self.written_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of routed slots whose expert had a slot; 1 if all are in memory."""
        hits = sum(layer.hits for layer in self.layers.values())
        slots = hits + sum(layer.misses for layer in self.layers.values())
        return hits / slots if slots else 1.0

    def to_json(self, whole: "RoutedBenchRow | None") -> JsonObject:
        """Return a row of the result; ``whole`` is the row with all experts in memory."""
        rate, did = self.decode_rate, self.report.activity
        theirs = None if whole is None or whole is self else whole.decode_rate.median
        return {
            "case": self.case.label,
            "ours": round(rate.median, 3),
            "ours_spread": [round(rate.low, 3), round(rate.high, 3)],
            "rival": None if theirs is None else ALL_RESIDENT,
            "theirs": None if theirs is None else round(theirs, 3),
            "unit": "tok/s",
            "better": "higher",
            "ratio": None if theirs is None else round(rate.median / theirs, 3),
            "spread": None,
            "share": self.case.share,
            **self.report.residence.to_json(),
            "read_tokens_per_s": round(self.prefill_rate, 3),
            "hit_rate": round(self.hit_rate, 6),
            "fallback_rate": round(self.report.fallback_rate, 6),
            "skipped_mass": round(self.report.skipped_share, 6),
            "loads": did.loads,
            "bytes_read": did.read_bytes,
            "waited_ms": round(did.waited_ms, 3),
            "waited_reading_ms": round(self.prefill_wait_ms, 3),
            "swaps": did.swaps,
            "memory": self.memory,
            "by_layer": [
                {"layer": number, **counts.to_json()} for number, counts in self.layers.items()
            ],
            "timeline": {**self.timeline.to_json(), "counted_from": self.first_counted_token},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBenchResult:
    """All rows of a benchmark of routed experts."""

    what: str
    cpu: str
    device: str | None = None
    """The device that computed; None for the CPU."""
    dtype: str
    threads: int
    texts: str
    """The texts, in words."""
    experts: int
    """Of each layer."""
    used: int
    layers: int
    rows: tuple[RoutedBenchRow, ...]
    start: WarmupConfig = COLD_START
    """How each case started."""
    cold: MoeColdOption = "auto"
    """How experts without a slot were to be read from disk; rows say how they were."""
    skip_cap: float | None = None
    """The largest share of a token's weight that might be skipped; None if none might."""
    seed: int | None = None
    """Of random texts; None for prompts."""
    warnings: tuple[str, ...] = ()

    @property
    def resident_row(self) -> RoutedBenchRow | None:
        """The row with all experts in memory, if it was measured."""
        return next((row for row in self.rows if row.case.is_whole), None)

    def to_json(self) -> JsonObject:
        """Return the document of a benchmark."""
        return {
            "name": "bench moe",
            "machine": {"cpu": self.cpu, "threads": self.threads, "device": self.device or "cpu"},
            "measured": {
                "what": self.what,
                "dtype": self.dtype,
                "texts": self.texts,
                "layers": self.layers,
                "experts": self.experts,
                "used": self.used,
                "seed": self.seed,
                "skip_cap": self.skip_cap,
                "start": _warmup_json(self.start, self.cold),
            },
            "rows": [row.to_json(self.resident_row) for row in self.rows],
            "warnings": list[JsonValue](self.warnings),
        }


def _warmup_json(wishes: WarmupConfig, cold: MoeColdOption) -> JsonObject:
    return {
        "profile": None if wishes.profile is None else str(wishes.profile),
        "pin": None if wishes.pins is None else str(wishes.pins),
        "warmup": wishes.warmup,
        "exchange": wishes.exchange,
        "cold": cold,
    }


def _nan_to_none(rate: float) -> float | None:
    return None if np.isnan(rate) else round(rate, 6)
