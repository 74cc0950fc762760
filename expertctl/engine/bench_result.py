"""What reading a text costs at least: bytes from memory, arithmetic; and the roof over both.

Weights are counted once for each pass over them, keys and values as often as a token needs them
together. Of routed experts a pass reads as many as one token uses, and may read more. A product and
its addition are two operations.

What a bench found: seconds of equal work, again and again, and what they say beside a roof.
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
    """What a pass reads and computes."""

    weight_bytes: int
    expert_bytes: int
    kv_bytes: int
    operations: int

    @property
    def nbytes(self) -> int:
        """All bytes that it reads."""
        return self.weight_bytes + self.expert_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte: few leave arithmetic idle, many leave memory idle."""
        return self.operations / self.nbytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a machine does in a second at most."""

    nbytes: float
    operations: float

    def attainable_rate(self, intensity: float) -> float:
        """Return the operations in a second that work of some intensity can reach."""
        return min(self.operations, intensity * self.nbytes)

    @property
    def ridge_intensity(self) -> float:
        """The intensity from which on arithmetic is the limit."""
        return self.operations / self.nbytes

    def min_seconds(self, work: PassWork) -> float:
        """Return the least time that work takes."""
        return work.operations / self.attainable_rate(work.intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """A base in memory, and a plan on it: what each pass over them takes."""

    config: ModelConfig
    layer_bytes: int
    """All matrices but embedding, head and those of routed experts."""
    head_bytes: int
    kv_itemsize: int
    routed_bytes: int = 0
    """The matrices of one routed expert."""
    expert_bytes: int = 0
    """What is read of the plan."""
    expert_numbers: int = 0
    """Numbers of its matrices; each is multiplied once for a token."""

    def decode_work(self, context: int) -> PassWork:
        """Return what one token behind so many others takes."""
        return PassWork(
            weight_bytes=self._pass_bytes + self.head_bytes,
            expert_bytes=self.expert_bytes,
            kv_bytes=self._kv_bytes(context + 1),
            operations=2 * (self._layer_numbers + self._head_numbers + self.expert_numbers)
            + self._attention_operations(context + 1),
        )

    def prefill_work(self, tokens: int, *, chunk: int) -> PassWork:
        """Return what a prompt takes that is read so many tokens at a time; its end is scored."""
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
        """The weights that a token is multiplied with."""
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
        """Return those of all routers, and of the experts that a token uses."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        routers = len(experts.layers) * experts.count * hidden
        return routers + self._active_expert_count * 3 * hidden * experts.intermediate_size

    @property
    def _active_expert_count(self) -> int:
        """How many experts of all layers a token is routed to."""
        experts = self.config.experts
        return 0 if experts is None else len(experts.layers) * experts.used

    @property
    def _pass_bytes(self) -> int:
        return self.layer_bytes + self._active_expert_count * self.routed_bytes

    def _kv_bytes(self, seen: int) -> int:
        """Return the bytes of the keys and values that all layers look at together."""
        one = self.config.count_kv_bytes(1, itemsize=self.kv_itemsize) // self.config.layers
        return one * sum(self._visible_lengths(seen))

    def _attention_operations(self, seen: int) -> int:
        """Return what scores and sums of one token take in all layers."""
        return 4 * self.config.heads * self.config.head_dim * sum(self._visible_lengths(seen))

    def _visible_lengths(self, seen: int) -> list[int]:
        return [min(seen, window or seen) for window in self.config.windows]


NOISY_SHARE = 0.2
"""Where the middle half of steps differs by more than this share of the median, a note says so."""
MIN_SCALING = 0.75
"""Threads that together compute less than this share of what each does alone lack cores."""
CACHE_BYTES = 128 << 20
"""Weights of fewer bytes may stay in the caches of a processor."""

_CACHED_NOTE = (
    "the weights are small enough to stay in the caches of the processor, so memory is no limit "
    "for them"
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
        """Sum up at least one figure."""
        ordered = sorted(figures)
        return cls(
            median(ordered),
            _interpolate_quantile(ordered, 0.25),
            _interpolate_quantile(ordered, 0.75),
        )

    @property
    def is_noisy(self) -> bool:
        """Whether the middle half is far apart."""
        return self.high - self.low > NOISY_SHARE * self.median


@dataclass(frozen=True, slots=True)
class TimingSeries:
    """Seconds that equal work took: some in each round, in the order of the rounds."""

    rounds: tuple[tuple[float, ...], ...]

    def rate(self, amount: float) -> Spread:
        """Return how much was done in a second, where each time ``amount`` was."""
        return Spread.from_figures([amount / seconds for each in self.rounds for seconds in each])

    @property
    def medians(self) -> list[float]:
        """Seconds by round."""
        return [median(each) for each in self.rounds]


@dataclass(frozen=True, slots=True)
class RooflineShare:
    """How near to its roof work came, in the same rounds; ``bound`` is what limits it there."""

    share: Spread
    bound: Bound


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of a bench; a text has a ``roof``, what the machine could do in the same unit."""

    case: str
    threads: int
    rate: Spread
    unit: str
    roof: float | None = None
    reach: RooflineShare | None = None
    work: PassWork | None = None
    tokens: int = 1
    """How many tokens the work is for."""

    @property
    def operations_per_s(self) -> float:
        """How much was computed in a second for a text."""
        return 0.0 if self.work is None else self.work.operations * self.rate.median / self.tokens

    def to_json(self) -> JsonObject:
        """Return it as a row of a benchmark, beside the operations for each byte."""
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
    """All figures of a bench; mappings are by number of threads, prompts by tokens."""

    what: str
    cpu: str
    dtype: str
    costs: ModelCosts
    chunk: int
    context: int
    """Tokens before those that are decoded, virtual ones too."""
    virtual: int
    read_bytes: int
    """What is read to measure memory."""
    memory: Mapping[int, TimingSeries]
    """Reading all weights, or more than a cache holds, and doing nothing with them."""
    arithmetic: Mapping[int, TimingSeries]
    arithmetic_operations: Mapping[int, int]
    tokens: Mapping[int, TimingSeries]
    prompts: Mapping[int, TimingSeries]
    warnings: tuple[str, ...] = ()

    @property
    def threads(self) -> list[int]:
        """The numbers of threads, from the smallest."""
        return sorted(self.tokens)

    def text_work(self, tokens: int | None = None) -> PassWork:
        """Return the work of one token, or of a prompt."""
        if tokens is None:
            return self.costs.decode_work(self.context)
        return self.costs.prefill_work(self.virtual + tokens, chunk=self.chunk)

    def make_roofline(self, threads: int) -> Roofline:
        """Return what was measured of the machine with so many threads."""
        memory = self.memory[threads].rate(self.read_bytes)
        arithmetic = self.arithmetic[threads].rate(self.arithmetic_operations[threads])
        return Roofline(memory.median, arithmetic.median)

    def decode_share(self, threads: int) -> RooflineShare:
        """Return how near one token after the other came to the roof of so many threads."""
        return self._roofline_share(self.text_work(), self.tokens[threads], threads)

    def prefill_share(self, tokens: int) -> RooflineShare:
        """Return how near a prompt came to the roof of all threads."""
        return self._roofline_share(self.text_work(tokens), self.prompts[tokens], self.threads[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """What makes the figures worth less than they look."""
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
        """Tell of cores that are not free, or not there."""
        few, many = self.threads[0], self.threads[-1]
        gain = self.make_roofline(many).operations / self.make_roofline(few).operations
        if gain > MIN_SCALING * many / few:
            return ()
        threads = "1 thread does" if few == 1 else f"{few} threads do"
        return (
            f"{many} threads compute {gain:.2f} times what {threads}: so many cores are not free, "
            "or share their units",
        )

    def to_json(self) -> JsonObject:
        """Return the document of ``bench --json``."""
        return {
            "name": "bench",
            "machine": {"cpu": self.cpu, "threads": self.threads[-1], "device": "cpu"},
            "measured": {
                "what": self.what,
                "dtype": self.dtype,
                "weights": self.costs.numbers,
                "context": self.context,
                "token_bytes": _bytes_document(self.text_work()),
            },
            "rows": list[JsonValue](row.to_json() for row in self.rows),
            "warnings": list[JsonValue](self.notes),
        }

    @property
    def rows(self) -> tuple["BenchRow", ...]:
        """What was measured, line by line: the machine with each number of threads, then texts."""
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
            case = "write"
            yield BenchRow(case, n, rate, "tokens/s", roof, self.decode_share(n), work)

    def _prompt_rows(self) -> Iterator["BenchRow"]:
        for tokens, series in self.prompts.items():
            work, n = self.text_work(tokens), self.threads[-1]
            roof = (self.virtual + tokens) / self.make_roofline(n).min_seconds(work)
            rate = series.rate(float(self.virtual + tokens))
            case = f"read {tokens}"
            reach, count = self.prefill_share(tokens), self.virtual + tokens
            yield BenchRow(case, n, rate, "tokens/s", roof, reach, work, count)

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


def _bytes_document(work: PassWork) -> JsonObject:
    return {"weights": work.weight_bytes, "experts": work.expert_bytes, "kv": work.kv_bytes}


def _noise_note(what: str, series: TimingSeries) -> str:
    ms = Spread.from_figures([seconds * 1e3 for each in series.rounds for seconds in each])
    return (
        f"{what}: half of the steps took {ms.low:.1f} to {ms.high:.1f} ms, the others less or "
        f"more; something else wants this machine, so take the figures for too low"
    )
