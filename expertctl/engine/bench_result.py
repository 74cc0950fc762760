"""What a bench found: seconds of equal work, again and again, and what they say beside a roof."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, Self

from expertctl.engine.roofline import Costs, Roof, Work
from expertctl.schema.strict_json import JsonObject, JsonValue

WIDE = 0.2
"""Where the middle half of steps differs by more than this share of the median, a note says so."""
ENOUGH = 0.75
"""Threads that together compute less than this share of what each does alone lack cores."""
CACHED = 128 << 20
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
    def of(cls, figures: list[float]) -> Self:
        """Sum up at least one figure."""
        ordered = sorted(figures)
        return cls(median(ordered), _quantile(ordered, 0.25), _quantile(ordered, 0.75))

    @property
    def is_wide(self) -> bool:
        """Whether the middle half is far apart."""
        return self.high - self.low > WIDE * self.median


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds that equal work took: some in each round, in the order of the rounds."""

    rounds: tuple[tuple[float, ...], ...]

    def rate(self, amount: float) -> Spread:
        """Return how much was done in a second, where each time ``amount`` was."""
        return Spread.of([amount / seconds for each in self.rounds for seconds in each])

    @property
    def medians(self) -> list[float]:
        """Seconds by round."""
        return [median(each) for each in self.rounds]


@dataclass(frozen=True, slots=True)
class Reach:
    """How near to its roof work came, in the same rounds; ``bound`` is what limits it there."""

    share: Spread
    bound: Bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a bench; a text has a ``roof``, what the machine could do in the same unit."""

    case: str
    threads: int
    rate: Spread
    unit: str
    roof: float | None = None
    reach: Reach | None = None
    work: Work | None = None
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
class Measured:
    """All figures of a bench; mappings are by number of threads, prompts by tokens."""

    what: str
    cpu: str
    dtype: str
    costs: Costs
    chunk: int
    context: int
    """Tokens before those that are decoded, virtual ones too."""
    virtual: int
    read_bytes: int
    """What is read to measure memory."""
    memory: Mapping[int, Series]
    """Reading all weights, or more than a cache holds, and doing nothing with them."""
    arithmetic: Mapping[int, Series]
    arithmetic_operations: Mapping[int, int]
    tokens: Mapping[int, Series]
    prompts: Mapping[int, Series]
    warnings: tuple[str, ...] = ()

    @property
    def threads(self) -> list[int]:
        """The numbers of threads, from the smallest."""
        return sorted(self.tokens)

    def work(self, tokens: int | None = None) -> Work:
        """Return the work of one token, or of a prompt."""
        if tokens is None:
            return self.costs.token(self.context)
        return self.costs.prompt(self.virtual + tokens, chunk=self.chunk)

    def roof(self, threads: int) -> Roof:
        """Return what was measured of the machine with so many threads."""
        memory = self.memory[threads].rate(self.read_bytes)
        arithmetic = self.arithmetic[threads].rate(self.arithmetic_operations[threads])
        return Roof(memory.median, arithmetic.median)

    def token_reach(self, threads: int) -> Reach:
        """Return how near one token after the other came to the roof of so many threads."""
        return self._reach(self.work(), self.tokens[threads], threads)

    def prompt_reach(self, tokens: int) -> Reach:
        """Return how near a prompt came to the roof of all threads."""
        return self._reach(self.work(tokens), self.prompts[tokens], self.threads[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """What makes the figures worth less than they look."""
        steps = [(f"decoding, threads: {n}", series) for n, series in self.tokens.items()]
        wide = [_told(what, series) for what, series in steps if series.rate(1).is_wide]
        size = self.costs.layer_bytes + self.costs.head_bytes
        small = size < CACHED
        return (*self.warnings, *((_CACHED_NOTE,) if small else ()), *self._missing(), *wide)

    def _missing(self) -> tuple[str, ...]:
        """Tell of cores that are not free, or not there."""
        few, many = self.threads[0], self.threads[-1]
        gain = self.roof(many).operations / self.roof(few).operations
        if gain > ENOUGH * many / few:
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
                "token_bytes": _bytes(self.work()),
            },
            "rows": list[JsonValue](row.to_json() for row in self.rows),
            "warnings": list[JsonValue](self.notes),
        }

    @property
    def rows(self) -> tuple["Row", ...]:
        """What was measured, line by line: the machine with each number of threads, then texts."""
        return (*self._machine_rows(), *self._token_rows(), *self._prompt_rows())

    def _machine_rows(self) -> Iterator["Row"]:
        for n in self.threads:
            rate = self.memory[n].rate(self.read_bytes / 1e9)
            yield Row("memory", n, rate, "GB/s")
        for n in self.threads:
            rate = self.arithmetic[n].rate(self.arithmetic_operations[n] / 1e9)
            yield Row("arithmetic", n, rate, "GFLOP/s")

    def _token_rows(self) -> Iterator["Row"]:
        for n in self.threads:
            work, rate = self.work(), self.tokens[n].rate(1.0)
            roof = 1 / self.roof(n).seconds(work)
            case = "write"
            yield Row(case, n, rate, "tokens/s", roof, self.token_reach(n), work)

    def _prompt_rows(self) -> Iterator["Row"]:
        for tokens, series in self.prompts.items():
            work, n = self.work(tokens), self.threads[-1]
            roof = (self.virtual + tokens) / self.roof(n).seconds(work)
            rate = series.rate(float(self.virtual + tokens))
            case = f"read {tokens}"
            reach, count = self.prompt_reach(tokens), self.virtual + tokens
            yield Row(case, n, rate, "tokens/s", roof, reach, work, count)

    def _reach(self, work: Work, series: Series, threads: int) -> Reach:
        memory, arithmetic = self.memory[threads].medians, self.arithmetic[threads].medians
        roofs = [
            Roof(self.read_bytes / read, self.arithmetic_operations[threads] / computed)
            for read, computed in zip(memory, arithmetic, strict=True)
        ]
        shares = [
            roof.seconds(work) / seconds
            for roof, seconds in zip(roofs, series.medians, strict=True)
        ]
        bound: Bound = "memory" if work.intensity < self.roof(threads).ridge else "arithmetic"
        return Reach(Spread.of(shares), bound)


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _bytes(work: Work) -> JsonObject:
    return {"weights": work.weight_bytes, "experts": work.expert_bytes, "kv": work.kv_bytes}


def _told(what: str, series: Series) -> str:
    ms = Spread.of([seconds * 1e3 for each in series.rounds for seconds in each])
    return (
        f"{what}: half of the steps took {ms.low:.1f} to {ms.high:.1f} ms, the others less or "
        f"more; something else wants this machine, so take the figures for too low"
    )
