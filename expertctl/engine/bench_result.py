"""Results of a bench: timings, the minimum work of a pass, and the roofline over both.

Work is counted as bytes read from memory and as operations; a multiply-add is two operations.
Weights count once per pass; keys and values count as often as all tokens together read them. For
routed experts a pass is assumed to read as many as one token uses; it may read more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, Self

from expertctl.engine.kernels.packed_format import is_routed_module
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject, JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Bytes read and operations computed by one pass."""

    weight_bytes: int
    expert_bytes: int
    kv_bytes: int
    operations: int

    @property
    def nbytes(self) -> int:
        """Total bytes read."""
        return self.weight_bytes + self.expert_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte: low values leave arithmetic units idle, high ones memory."""
        return self.operations / self.nbytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak memory bandwidth in bytes/s and peak arithmetic in operations/s of a machine."""

    nbytes: float
    operations: float

    def attainable_rate(self, intensity: float) -> float:
        """Return the operations per second attainable at an arithmetic intensity."""
        return min(self.operations, intensity * self.nbytes)

    @property
    def ridge_intensity(self) -> float:
        """The intensity, in operations per byte, above which arithmetic is the limit."""
        return self.operations / self.nbytes

    def min_seconds(self, work: PassWork) -> float:
        """Return the minimum time of some work, in seconds."""
        return work.operations / self.attainable_rate(work.intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Cost of each pass over a base and the plan on it."""

    config: ModelConfig
    layer_bytes: int
    """All matrices except the embedding, the head and those of routed experts."""
    head_bytes: int
    kv_itemsize: int
    routed_bytes: int = 0
    """The matrices of one routed expert."""
    expert_bytes: int = 0
    """Bytes read of the plan."""
    expert_numbers: int = 0
    """Elements of the plan's matrices; each is multiplied once per token."""

    def decode_work(self, context: int) -> PassWork:
        """Return the work of decoding one token after ``context`` others."""
        return PassWork(
            weight_bytes=self._pass_bytes + self.head_bytes,
            expert_bytes=self.expert_bytes,
            kv_bytes=self._kv_bytes(context + 1),
            operations=2 * (self._layer_numbers + self._head_numbers + self.expert_numbers)
            + self._attention_operations(context + 1),
        )

    def prefill_work(self, tokens: int, *, chunk: int) -> PassWork:
        """Return the work of reading a prompt in chunks; only its last token is scored."""
        passes = -(-tokens // chunk)
        ends = [min((number + 1) * chunk, tokens) for number in range(passes)]
        return PassWork(
            weight_bytes=passes * self._pass_bytes + self.head_bytes,
            expert_bytes=passes * self.expert_bytes,
            kv_bytes=sum(map(self._kv_bytes, ends)),
            operations=2 * tokens * (self._layer_numbers + self.expert_numbers)
            + 2 * self._head_numbers
            + sum(self._attention_operations(seen) for seen in range(1, tokens + 1)),
        )

    @property
    def numbers(self) -> int:
        """Number of weights that each token is multiplied by."""
        return self._layer_numbers + self._head_numbers

    @property
    def _head_numbers(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _layer_numbers(self) -> int:
        shapes = self.config.linear_shapes().items()
        common = sum(
            rows * columns for name, (rows, columns) in shapes if not is_routed_module(name)
        )
        return common - self._head_numbers + self._routed_numbers

    @property
    def _routed_numbers(self) -> int:
        """Return the weights of all routers and of the experts that a token uses."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        routers = len(experts.layers) * experts.count * hidden
        return routers + self._active_expert_count * 3 * hidden * experts.intermediate_size

    @property
    def _active_expert_count(self) -> int:
        """Number of experts, over all layers, that a token is routed to."""
        experts = self.config.experts
        return 0 if experts is None else len(experts.layers) * experts.used

    @property
    def _pass_bytes(self) -> int:
        return self.layer_bytes + self._active_expert_count * self.routed_bytes

    def _kv_bytes(self, seen: int) -> int:
        """Return the bytes of keys and values that all layers together attend to."""
        one = self.config.count_kv_bytes(1, itemsize=self.kv_itemsize) // self.config.layers
        return one * sum(self._visible_lengths(seen))

    def _attention_operations(self, seen: int) -> int:
        """Return the operations for the attention scores and sums of one token in all layers."""
        return 4 * self.config.heads * self.config.head_dim * sum(self._visible_lengths(seen))

    def _visible_lengths(self, seen: int) -> list[int]:
        return [min(seen, window or seen) for window in self.config.windows]


NOISY_SHARE = 0.2
"""A note is added where the interquartile range of steps exceeds this share of the median."""
MIN_SCALING = 0.75
"""A note is added where threads together reach less than this share of ideal scaling."""
CACHE_BYTES = 128 << 20
"""Weights of fewer bytes may stay in the processor's caches."""

_CACHED_NOTE = (
    "the weights fit into the caches of the processor, so memory bandwidth does not limit them"
)

Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def from_figures(cls, figures: list[float]) -> Self:
        """Summarise at least one figure."""
        ordered = sorted(figures)
        return cls(
            median(ordered),
            _interpolate_quantile(ordered, 0.25),
            _interpolate_quantile(ordered, 0.75),
        )

    @property
    def is_noisy(self) -> bool:
        """Whether the interquartile range is wide relative to the median."""
        return self.high - self.low > NOISY_SHARE * self.median


@dataclass(frozen=True, slots=True)
class TimingSeries:
    """Seconds taken by repetitions of equal work, grouped by round."""

    rounds: tuple[tuple[float, ...], ...]

    def rate(self, amount: float) -> Spread:
        """Return the rate per second, where each repetition processed ``amount``."""
        return Spread.from_figures([amount / seconds for each in self.rounds for seconds in each])

    @property
    def medians(self) -> list[float]:
        """Median seconds of each round."""
        return [median(each) for each in self.rounds]


@dataclass(frozen=True, slots=True)
class RooflineShare:
    """Share of the roofline reached in the same rounds; ``bound`` names the limiting resource."""

    share: Spread
    bound: Bound


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One row of a bench; rows of sequences have a ``roof``, the limit in the same unit."""

    case: str
    threads: int
    rate: Spread
    unit: str
    roof: float | None = None
    reach: RooflineShare | None = None
    work: PassWork | None = None
    tokens: int = 1
    """Number of tokens that the work covers."""

    @property
    def operations_per_s(self) -> float:
        """Operations per second while processing a sequence."""
        return 0.0 if self.work is None else self.work.operations * self.rate.median / self.tokens

    def to_json(self) -> JsonObject:
        """Return the row in the format of a benchmark document, with bytes and operations."""
        share = None if self.reach is None else self.reach.share
        return {
            "case": f"{self.case}, threads: {self.threads}",
            "threads": self.threads,
            "ours": round(self.rate.median, 3),
            "ours_spread": [round(self.rate.low, 3), round(self.rate.high, 3)],
            "rival": None if self.reach is None else f"{self.reach.bound} of this machine",
            "theirs": None if self.roof is None else round(self.roof, 3),
            "unit": self.unit,
            "better": "higher",
            "ratio": None if share is None else round(share.median, 3),
            "spread": None if share is None else [round(share.low, 3), round(share.high, 3)],
            "bytes": None if self.work is None else self.work.nbytes,
            "operations": None if self.work is None else self.work.operations,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All figures of a bench; mappings are keyed by thread count, ``prompts`` by tokens."""

    what: str
    cpu: str
    dtype: str
    costs: ModelCosts
    chunk: int
    context: int
    """Tokens before those that are decoded, virtual ones included."""
    virtual: int
    read_bytes: int
    """Bytes read in one repetition of the memory measurement."""
    memory: Mapping[int, TimingSeries]
    """Reading all weights, or a block larger than the caches, without computing."""
    arithmetic: Mapping[int, TimingSeries]
    arithmetic_operations: Mapping[int, int]
    tokens: Mapping[int, TimingSeries]
    prompts: Mapping[int, TimingSeries]
    warnings: tuple[str, ...] = ()

    @property
    def threads(self) -> list[int]:
        """The thread counts, in ascending order."""
        return sorted(self.tokens)

    def text_work(self, tokens: int | None = None) -> PassWork:
        """Return the work of decoding one token, or of reading a prompt of so many tokens."""
        if tokens is None:
            return self.costs.decode_work(self.context)
        return self.costs.prefill_work(self.virtual + tokens, chunk=self.chunk)

    def make_roofline(self, threads: int) -> Roofline:
        """Return the roofline measured with so many threads."""
        memory = self.memory[threads].rate(self.read_bytes)
        arithmetic = self.arithmetic[threads].rate(self.arithmetic_operations[threads])
        return Roofline(memory.median, arithmetic.median)

    def decode_share(self, threads: int) -> RooflineShare:
        """Return the share of the roofline that decoding reached with so many threads."""
        return self._roofline_share(self.text_work(), self.tokens[threads], threads)

    def prefill_share(self, tokens: int) -> RooflineShare:
        """Return the share of the roofline that prefill reached with all threads."""
        return self._roofline_share(self.text_work(tokens), self.prompts[tokens], self.threads[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why the figures may be less reliable than they look."""
        steps = [(f"decoding, threads: {n}", series) for n, series in self.tokens.items()]
        wide = [_noise_note(what, series) for what, series in steps if series.rate(1).is_noisy]
        size = self.costs.layer_bytes + self.costs.head_bytes
        small = size < CACHE_BYTES
        return (
            *self.warnings,
            *((_CACHED_NOTE,) if small else ()),
            *self._missing_core_notes(),
            *wide,
        )

    def _missing_core_notes(self) -> tuple[str, ...]:
        """Report cores that are busy or missing."""
        few, many = self.threads[0], self.threads[-1]
        gain = self.make_roofline(many).operations / self.make_roofline(few).operations
        if gain > MIN_SCALING * many / few:
            return ()
        threads = "1 thread" if few == 1 else f"{few} threads"
        return (
            f"{many} threads compute {gain:.2f} times as much as {threads}: some cores are busy, "
            "or share execution units",
        )

    def to_json(self) -> JsonObject:
        """Return the document of ``bench --json``."""
        token = self.text_work()
        return {
            "name": "bench",
            "machine": {"cpu": self.cpu, "threads": self.threads[-1], "device": "cpu"},
            "measured": {
                "what": self.what,
                "dtype": self.dtype,
                "weights": self.costs.numbers,
                "context": self.context,
                "token_bytes": {
                    "weights": token.weight_bytes,
                    "experts": token.expert_bytes,
                    "kv": token.kv_bytes,
                },
            },
            "rows": list[JsonValue](row.to_json() for row in self.rows),
            "warnings": list[JsonValue](self.notes),
        }

    @property
    def rows(self) -> tuple["BenchRow", ...]:
        """The measured rows: the machine at each thread count, then decoding and prompts."""
        return (*self._machine_rows(), *self._token_rows(), *self._prompt_rows())

    def _machine_rows(self) -> Iterator["BenchRow"]:
        for n in self.threads:
            rate = self.memory[n].rate(self.read_bytes / 1e9)
            yield BenchRow("memory", n, rate, "GB/s")
        for n in self.threads:
            rate = self.arithmetic[n].rate(self.arithmetic_operations[n] / 1e9)
            yield BenchRow("arithmetic", n, rate, "GFLOP/s")

    def _token_rows(self) -> Iterator["BenchRow"]:
        for n in self.threads:
            work, rate = self.text_work(), self.tokens[n].rate(1.0)
            roof = 1 / self.make_roofline(n).min_seconds(work)
            yield BenchRow("write", n, rate, "tokens/s", roof, self.decode_share(n), work)

    def _prompt_rows(self) -> Iterator["BenchRow"]:
        for tokens, series in self.prompts.items():
            work, n = self.text_work(tokens), self.threads[-1]
            roof = (self.virtual + tokens) / self.make_roofline(n).min_seconds(work)
            rate = series.rate(float(self.virtual + tokens))
            reach, count = self.prefill_share(tokens), self.virtual + tokens
            yield BenchRow(f"read {tokens}", n, rate, "tokens/s", roof, reach, work, count)

    def _roofline_share(self, work: PassWork, series: TimingSeries, threads: int) -> RooflineShare:
        memory, arithmetic = self.memory[threads].medians, self.arithmetic[threads].medians
        roofs = [
            Roofline(self.read_bytes / read, self.arithmetic_operations[threads] / computed)
            for read, computed in zip(memory, arithmetic, strict=True)
        ]
        shares = [
            roof.min_seconds(work) / seconds
            for roof, seconds in zip(roofs, series.medians, strict=True)
        ]
        bound: Bound = (
            "memory"
            if work.intensity < self.make_roofline(threads).ridge_intensity
            else "arithmetic"
        )
        return RooflineShare(Spread.from_figures(shares), bound)


def _interpolate_quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _noise_note(what: str, series: TimingSeries) -> str:
    ms = Spread.from_figures([seconds * 1e3 for each in series.rounds for seconds in each])
    return (
        f"{what}: the middle half of the steps took {ms.low:.1f} to {ms.high:.1f} ms; other "
        "programs use this machine, so the figures are probably too low"
    )
