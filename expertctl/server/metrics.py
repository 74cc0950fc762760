"""`Metrics`: what a running server counts, for Prometheus.

Requests and answers are counted as they end; the state of the engine is read from its snapshot on
each scrape. Routes are templates, and methods and outcomes are closed sets, so no client can create
new time series; only installed experts have a series each. The ``vllm:`` series have the names and
labels by which gateways schedule to vLLM servers (the model server protocol of the Gateway API
inference extension).

Routed experts are counted per layer since the last reset, and not at all while counting is off
(`/moe`); totals for the whole base are counted since it was loaded.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from expertctl.engine.moe.counters import CounterSnapshot, LayerCounts, RoutedExpertStats
from expertctl.engine.result import RunResult
from expertctl.engine.serving.request import KV_BLOCK_TOKENS, EngineSnapshot
from expertctl.errors import ExpertError

Family = CounterMetricFamily | GaugeMetricFamily
_LAYER_PREFIX = "expertctl_moe_layer"
_SECONDS_PER_NANOSECOND = 1e-9
"""Seconds per nanosecond."""
_LAYER_COUNTERS: tuple[tuple[str, str, Callable[[LayerCounts], int]], ...] = (
    ("calls", "Forward passes over a layer of routed experts.", lambda layer: layer.calls),
    (
        "hits",
        "Token-to-expert choices whose routed expert was in memory.",
        lambda layer: layer.hits,
    ),
    (
        "misses",
        "Token-to-expert choices whose routed expert was not in memory.",
        lambda layer: layer.misses,
    ),
    (
        "requests",
        "Routed experts requested, each counted once per pass.",
        lambda layer: layer.requests,
    ),
    (
        "missed_requests",
        "Requested routed experts that were not in memory, each counted once per pass.",
        lambda layer: layer.missed_requests,
    ),
    ("swaps", "Routed experts that replaced another one in its slot.", lambda layer: layer.swaps),
)
_LAYER_RATES: tuple[tuple[str, str, Callable[[LayerCounts], float]], ...] = (
    (
        "fallback_rate",
        "Fraction of routed-expert requests that missed.",
        lambda layer: layer.fallback_rate,
    ),
    (
        "hot_slot_ratio",
        "Fraction of choices whose routed expert was in memory.",
        lambda layer: layer.hot_slot_ratio,
    ),
)


def build_routed_families(now: EngineSnapshot) -> Iterator[Family]:
    """Yield the series of routed experts; none if the base has none."""
    if now.routed is not None:
        yield from _base_families(now.routed)
    if now.observed is not None and now.observed.mode != "off":
        yield from _layer_families(now.observed)


def _base_families(report: RoutedExpertStats) -> Iterator[Family]:
    residence, did = report.residence, report.activity
    yield GaugeMetricFamily(
        "expertctl_moe_experts",
        "Number of routed experts of the base model.",
        value=residence.layers * residence.experts,
    )
    yield GaugeMetricFamily(
        "expertctl_moe_experts_in_memory",
        "Number of routed experts that fit in memory.",
        value=residence.blocks,
    )
    for name, text, value in (
        ("loads", "Routed experts read from files.", did.loads),
        ("read_bytes", "Bytes read from files for routed experts.", did.read_bytes),
        (
            "waited_seconds",
            "Seconds that forward passes waited for routed experts.",
            did.waited_ms / 1e3,
        ),
        ("mass", "Sum of the router weights of all chosen experts.", did.router_weight),
        ("skipped_mass", "Sum of the router weights of skipped experts.", did.skipped_weight),
    ):
        yield CounterMetricFamily(f"expertctl_moe_{name}", text, value=value)


def _layer_families(seen: CounterSnapshot) -> Iterator[Family]:
    for name, text, count in _LAYER_COUNTERS:
        counter = CounterMetricFamily(f"{_LAYER_PREFIX}_{name}", text, labels=["layer"])
        for number, layer in seen.layers.items():
            counter.add_metric([str(number)], count(layer))
        yield counter
    for name, text, rate in _LAYER_RATES:
        gauge = GaugeMetricFamily(f"{_LAYER_PREFIX}_{name}", text, labels=["layer"])
        for number, layer in seen.layers.items():
            gauge.add_metric([str(number)], rate(layer))
        yield gauge
    yield _layer_seconds_family(seen)
    yield CounterMetricFamily(
        "expertctl_moe_overflow_resets",
        "Number of times the routed-expert counters overflowed and were reset.",
        value=seen.overflow_resets,
    )


def _layer_seconds_family(seen: CounterSnapshot) -> Family:
    family = CounterMetricFamily(
        f"{_LAYER_PREFIX}_seconds",
        "Seconds spent computing routed experts and waiting for them.",
        labels=["layer", "lane"],
    )
    for number, layer in seen.layers.items():
        family.add_metric([str(number), "compute"], layer.hot_ns * _SECONDS_PER_NANOSECOND)
        family.add_metric([str(number), "wait"], layer.cold_ns * _SECONDS_PER_NANOSECOND)
    return family


CONTENT_TYPE = CONTENT_TYPE_LATEST
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RATE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_STAGES = ("route", "queue", "load", "prefill", "decode", "post")
ReadSnapshot = Callable[[], tuple[str, EngineSnapshot] | None]
"""Returns the base's name and a snapshot; None before the engine is ready."""


class Metrics:
    """The counters and histograms of one server."""

    def __init__(self) -> None:
        """Create every time series, with nothing counted."""
        self._own = CollectorRegistry()
        self._requests = self._counter(
            "requests", "HTTP requests by method, route and status.", "method", "route", "status"
        )
        self._request_seconds = self._histogram(
            "request_seconds",
            "Seconds from the request line to the end of the response.",
            _SECONDS_BUCKETS,
            "route",
        )
        self.running = Gauge(
            "expertctl_requests_running", "HTTP requests in progress.", registry=self._own
        )
        self._answers = self._counter(
            "answers", "Generated answers by finish reason.", "finish_reason"
        )
        self._failures = self._counter("jobs_failed", "Failed jobs by error code.", "code")
        self._refusals = self._counter("jobs_refused", "Refused jobs by error code.", "code")
        self._validated = self._counter(
            "answers_validated", "Answers that were validated, by result.", "passed"
        )
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from submission to the first token.",
            _SECONDS_BUCKETS,
        )
        self._gaps = self._histogram(
            "inter_token_seconds", "Seconds between two text deltas of an answer.", _GAP_BUCKETS
        )
        self._stages = self._histogram(
            "stage_seconds", "Seconds per stage of an answer.", _SECONDS_BUCKETS, "stage"
        )
        self._prefill = self._histogram(
            "prefill_tokens_per_second",
            "Prefill rate of an answer in tokens per second.",
            _RATE_BUCKETS,
        )
        self._decode = self._histogram(
            "decode_tokens_per_second",
            "Decode rate of an answer in tokens per second.",
            _RATE_BUCKETS,
        )

    def count_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        known = method if method in _METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def count_answer(self, result: RunResult) -> None:
        """Count one answer of an ended job."""
        generated, ms = result.generated, result.timings_ms
        self._answers.labels(generated.finish_reason).inc()
        if result.validation_passed is not None:
            self._validated.labels("yes" if result.validation_passed else "no").inc()
        if generated.tokens and "ttft" in ms:
            self._first.observe(ms["ttft"] / 1000)
        for stage in _STAGES:
            if stage in ms:
                self._stages.labels(stage).observe(ms[stage] / 1000)
        if generated.prefill_tokens:
            self._prefill.observe(generated.prefill_tokens_per_s)
        if generated.decode_steps:
            self._decode.observe(generated.tokens_per_s)

    def observe_gap(self, seconds: float) -> None:
        """Record the time between two deltas of an answer."""
        self._gaps.observe(seconds)

    def count_failure(self, error: ExpertError) -> None:
        """Count a job that failed."""
        self._failures.labels(error.code).inc()

    def count_refusal(self, error: ExpertError) -> None:
        """Count a job that was refused."""
        self._refusals.labels(error.code).inc()

    def read_first_token_totals(self) -> tuple[int, float]:
        """Return the number of answers with a first token, and their summed seconds to it."""
        samples = [sample for family in self._first.collect() for sample in family.samples]
        values = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
        return int(values["count"]), values["sum"]

    def render(self, read: ReadSnapshot) -> bytes:
        """Return all metrics in the text format, including the engine's current state."""
        shown = CollectorRegistry()
        shown.register(self._own)
        if (now := read()) is not None:
            shown.register(_EngineCollector(*now))
        return generate_latest(shown)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"expertctl_{name}", text, labels, registry=self._own)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            f"expertctl_{name}", text, labels, buckets=tuple(buckets), registry=self._own
        )


class _EngineCollector(Collector):
    """The time series of an engine snapshot."""

    def __init__(self, base: str, now: EngineSnapshot) -> None:
        self._base, self._now = base, now

    def describe(self) -> list[Family]:
        """Declare no series in advance."""
        return []

    def collect(self) -> Iterator[Family]:
        yield from _job_families(self._now)
        yield from _token_families(self._now)
        yield from _memory_families(self._now)
        yield from _expert_families(self._now)
        yield from build_routed_families(self._now)
        yield from _vllm_families(self._base, self._now)


def _job_families(now: EngineSnapshot) -> Iterator[Family]:
    yield _gauge_family("queue_jobs", "Jobs in the queue.", now.waiting)
    yield _gauge_family("preparing_jobs", "Jobs being routed and loaded.", now.preparing)
    yield _gauge_family("batch_texts", "Sequences in the running batch.", now.running)
    yield _gauge_family("batch_rows", "Maximum number of sequences in the batch.", now.rows)
    jobs = CounterMetricFamily("expertctl_jobs", "Ended jobs by outcome.", labels=["outcome"])
    for outcome in ("finished", "failed", "cancelled", "refused"):
        jobs.add_metric([outcome], getattr(now.totals, outcome))
    yield jobs
    yield _counter_family(
        "texts_paused", "Sequences preempted to free memory for older ones.", now.totals.paused
    )
    yield _counter_family("steps", "Decode steps.", now.counts.steps)
    yield _counter_family(
        "step_rows",
        "Sequences summed over all decode steps; divided by steps, the mean batch size.",
        now.counts.step_rows,
    )


def _token_families(now: EngineSnapshot) -> Iterator[Family]:
    tokens = CounterMetricFamily(
        "expertctl_tokens",
        "Tokens by kind: prompt, reused from the prefix cache, generated.",
        labels=["kind"],
    )
    tokens.add_metric(["prompt"], now.totals.prompt_tokens)
    tokens.add_metric(["reused"], now.totals.reused_tokens)
    tokens.add_metric(["generated"], now.totals.generated_tokens)
    yield tokens


def _memory_families(now: EngineSnapshot) -> Iterator[Family]:
    owners = GaugeMetricFamily(
        "expertctl_memory_bytes", "Memory in bytes by owner.", labels=["owner"]
    )
    for owner, size in now.held.items():
        owners.add_metric([owner], size)
    yield owners
    yield _gauge_family("memory_limit_bytes", "Memory budget in bytes.", now.limit)
    yield _gauge_family("memory_peak_bytes", "Peak memory in bytes.", now.peak)
    yield _gauge_family("kv_bytes", "KV cache bytes of running sequences.", now.kv_in_use)
    yield _gauge_family(
        "kv_limit_bytes", "KV cache bytes that running sequences may use.", now.kv_limit
    )
    kept = max(0, now.held["kv"] - now.kv_in_use)
    yield _gauge_family("kv_kept_bytes", "KV cache bytes kept for later requests.", kept)
    yield _gauge_family(
        "kv_kept_limit_bytes", "Maximum KV cache bytes kept for later requests.", now.kv_kept_limit
    )
    blocks = GaugeMetricFamily(
        "expertctl_kv_blocks",
        f"KV cache blocks of {KV_BLOCK_TOKENS} tokens by state.",
        labels=["state"],
    )
    held = now.held["kv"]
    for state, size in (
        ("used", now.kv_in_use),
        ("kept", kept),
        ("free", max(0, now.kv_limit - held)),
    ):
        blocks.add_metric([state], size // now.kv_block)
    yield blocks


def _expert_families(now: EngineSnapshot) -> Iterator[Family]:
    for name, text in (
        ("hits", "Experts found in the cache."),
        ("loads", "Experts loaded into the cache."),
        ("evictions", "Experts evicted from the cache."),
        ("waits", "Requests that joined a load in progress."),
    ):
        family = CounterMetricFamily(f"expertctl_expert_{name}", text, labels=["tier"])
        for tier, traffic in now.traffic.items():
            family.add_metric([tier], getattr(traffic, name))
        yield family
    loaded = CounterMetricFamily(
        "expertctl_expert_loaded_bytes", "Bytes of experts loaded by tier.", labels=["tier"]
    )
    for tier, traffic in now.traffic.items():
        loaded.add_metric([tier], traffic.nbytes)
    yield loaded
    requests = CounterMetricFamily(
        "expertctl_expert_requests", "Jobs that used an expert.", labels=["expert"]
    )
    for ref, jobs in now.totals.experts:
        requests.add_metric([ref], jobs)
    yield requests


def _vllm_families(base: str, now: EngineSnapshot) -> Iterator[Family]:
    usage = now.kv_in_use / now.kv_limit if now.kv_limit > 0 else 1.0
    for name, text, value in (
        ("num_requests_running", "Number of requests in model execution batches.", now.running),
        ("num_requests_waiting", "Number of requests waiting.", now.waiting + now.preparing),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", min(1.0, usage)),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        family.add_metric([base, "0"], value)
        yield family
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    text = "Running stats on lora requests."
    adapters = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
    names = [_join_models(now.running_plans), _join_models(now.waiting_plans)]
    adapters.add_metric([str(now.rows), *names], time.time())
    yield adapters


def _join_models(plans: Iterable[tuple[str, ...]]) -> str:
    """Return the distinct plans in the notation of a request's ``model``."""
    names = {"+".join(ref.partition("@")[0] for ref in plan) for plan in plans if plan}
    return ",".join(sorted(names))


def _gauge_family(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"expertctl_{name}", text, value=value)


def _counter_family(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"expertctl_{name}", text, value=value)
