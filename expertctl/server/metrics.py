"""What is counted about a running server, for Prometheus.

Requests and answers are counted as they end; what the engine is doing is read from its snapshot on
each scrape. Routes are templates, and methods and outcomes are closed sets: no client can make new
time series. Those with ``vllm:`` have the names and labels by which gateways schedule to servers
of vLLM (the model server protocol of the gateway API inference extension). Each expert that is
counted separately has a series of its own.
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

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.snapshot import BLOCK, Snapshot
from expertctl.errors import ExpertError
from expertctl.server.routed_metrics import Family, routed_families

CONTENT_TYPE = CONTENT_TYPE_LATEST
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_STAGES = ("route", "queue", "load", "prefill", "decode", "post")
Read = Callable[[], tuple[str, Snapshot] | None]
"""Returns the name of the base and a snapshot; None before the engine is ready."""


class Metrics:
    """The time series of one server."""

    def __init__(self) -> None:
        """Make every time series; nothing is counted yet."""
        self._own = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests that were answered.", "method", "route", "status"
        )
        self._request_seconds = self._histogram(
            "request_seconds", "From the request line to the end of the answer.", _SECONDS, "route"
        )
        self.running = Gauge(
            "expertctl_requests_running", "Requests that are being answered.", registry=self._own
        )
        self._answers = self._counter("answers", "Answers, by how they ended.", "finish_reason")
        self._failures = self._counter("jobs_failed", "Jobs without an answer.", "code")
        self._refusals = self._counter("jobs_refused", "Jobs that were not taken.", "code")
        self._validated = self._counter(
            "answers_validated", "Answers whose form was checked.", "passed"
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From the job to its first token.", _SECONDS
        )
        self._gaps = self._histogram(
            "inter_token_seconds", "Between two pieces of a text that became certain.", _GAPS
        )
        self._stages = self._histogram(
            "stage_seconds", "How long each part of an answer took.", _SECONDS, "stage"
        )
        self._prefill = self._histogram(
            "prefill_tokens_per_second", "Tokens of a prompt that were read in a second.", _RATES
        )
        self._decode = self._histogram(
            "decode_tokens_per_second", "Tokens of an answer that were written in a second.", _RATES
        )

    def requested(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request that has ended."""
        known = method if method in _METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def answered(self, result: RunResult) -> None:
        """Count one answer of a job that has ended."""
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

    def gap(self, seconds: float) -> None:
        """Count the time between two pieces of a text."""
        self._gaps.observe(seconds)

    def failed(self, error: ExpertError) -> None:
        """Count a job without an answer."""
        self._failures.labels(error.code).inc()

    def refused(self, error: ExpertError) -> None:
        """Count a job that was refused."""
        self._refusals.labels(error.code).inc()

    def first_tokens(self) -> tuple[int, float]:
        """Return how many answers had a first token, and the sum of their seconds to it."""
        samples = [sample for family in self._first.collect() for sample in family.samples]
        values = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
        return int(values["count"]), values["sum"]

    def exposition(self, read: Read) -> bytes:
        """Return all metrics in the text format, including what the engine does now."""
        shown = CollectorRegistry()
        shown.register(_Forward(self._own))
        if (now := read()) is not None:
            shown.register(_Live(*now))
        return generate_latest(shown)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"expertctl_{name}", text, labels, registry=self._own)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            f"expertctl_{name}", text, labels, buckets=tuple(buckets), registry=self._own
        )


class _Forward(Collector):
    """The time series of one registry, collected as part of another."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[object]:  # type: ignore[override]  # Metric, which it re-exports untyped
        yield from self._source.collect()


class _Live(Collector):
    """What the engine is doing."""

    def __init__(self, base: str, now: Snapshot) -> None:
        self._base, self._now = base, now

    def describe(self) -> list[Family]:
        """Name no series beforehand."""
        return []

    def collect(self) -> Iterator[Family]:
        yield from _jobs(self._now)
        yield from _tokens(self._now)
        yield from _memory(self._now)
        yield from _experts(self._now)
        yield from routed_families(self._now)
        yield from _as_vllm(self._base, self._now)


def _jobs(now: Snapshot) -> Iterator[Family]:
    yield _gauge("queue_jobs", "Jobs that wait.", now.waiting)
    yield _gauge("preparing_jobs", "Jobs that are planned and loaded for.", now.preparing)
    yield _gauge("batch_texts", "Texts that are written now.", now.running)
    yield _gauge("batch_rows", "How many there may be.", now.rows)
    jobs = CounterMetricFamily("expertctl_jobs", "Jobs at their end.", labels=["outcome"])
    for outcome in ("finished", "failed", "cancelled", "refused"):
        jobs.add_metric([outcome], getattr(now.totals, outcome))
    yield jobs
    yield _counted(
        "texts_paused",
        "Texts that gave their memory to earlier ones for a while.",
        now.totals.paused,
    )
    yield _counted("steps", "Passes over the base that wrote tokens.", now.counts.steps)
    yield _counted("step_rows", "Texts in all of them: divided, the batch.", now.counts.step_rows)


def _tokens(now: Snapshot) -> Iterator[Family]:
    tokens = CounterMetricFamily("expertctl_tokens", "Tokens of jobs.", labels=["kind"])
    tokens.add_metric(["prompt"], now.totals.prompt_tokens)
    tokens.add_metric(["reused"], now.totals.reused_tokens)
    tokens.add_metric(["generated"], now.totals.generated_tokens)
    yield tokens


def _memory(now: Snapshot) -> Iterator[Family]:
    owners = GaugeMetricFamily(
        "expertctl_memory_bytes", "Bytes, by what holds them.", labels=["owner"]
    )
    for owner, size in now.held.items():
        owners.add_metric([owner], size)
    yield owners
    yield _gauge("memory_limit_bytes", "The most that may be held.", now.limit)
    yield _gauge("memory_peak_bytes", "The most that was.", now.peak)
    yield _gauge("kv_bytes", "Keys and values of texts that are written.", now.kv_in_use)
    yield _gauge("kv_limit_bytes", "What they may take beside the rest.", now.kv_limit)
    kept = max(0, now.held["kv"] - now.kv_in_use)
    yield _gauge("kv_kept_bytes", "Keys and values kept for later requests.", kept)
    yield _gauge("kv_kept_limit_bytes", "The most of them that is kept.", now.kv_kept_limit)
    blocks = GaugeMetricFamily(
        "expertctl_kv_blocks", f"Keys and values, in blocks of {BLOCK} tokens.", labels=["state"]
    )
    held = now.held["kv"]
    for state, size in (
        ("used", now.kv_in_use),
        ("kept", kept),
        ("free", max(0, now.kv_limit - held)),
    ):
        blocks.add_metric([state], size // now.kv_block)
    yield blocks


def _experts(now: Snapshot) -> Iterator[Family]:
    for name, text in (
        ("hits", "Experts that were there already."),
        ("loads", "Experts that had to be brought."),
        ("evictions", "Experts that made room."),
        ("waits", "Experts that were on their way already."),
    ):
        family = CounterMetricFamily(f"expertctl_expert_{name}", text, labels=["tier"])
        for tier, traffic in now.traffic.items():
            family.add_metric([tier], getattr(traffic, name))
        yield family
    loaded = CounterMetricFamily("expertctl_expert_loaded_bytes", "Bytes brought.", labels=["tier"])
    for tier, traffic in now.traffic.items():
        loaded.add_metric([tier], traffic.nbytes)
    yield loaded
    asked = CounterMetricFamily(
        "expertctl_expert_requests", "Jobs that an expert had a part in.", labels=["expert"]
    )
    for ref, jobs in now.totals.experts:
        asked.add_metric([ref], jobs)
    yield asked


def _as_vllm(base: str, now: Snapshot) -> Iterator[Family]:
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
    names = [_models(now.running_plans), _models(now.waiting_plans)]
    adapters.add_metric([str(now.rows), *names], time.time())
    yield adapters


def _models(plans: Iterable[tuple[str, ...]]) -> str:
    """Return the plans as the ``model`` of a request names them, each once."""
    names = {"+".join(ref.partition("@")[0] for ref in plan) for plan in plans if plan}
    return ",".join(sorted(names))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"expertctl_{name}", text, value=value)


def _counted(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"expertctl_{name}", text, value=value)
