"""One line of the log for each job: which experts answered, how long each stage took, the outcome.

It has neither prompt nor answer. All lines have the same keys.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Job
from expertctl.errors import ExpertError
from expertctl.schema.strict_json import JsonObject, JsonValue

_INFERENCE = ("prefill", "decode")
_PARTIAL = {"cancelled", "timeout"}


def answered(job: Job, results: Sequence[RunResult], *, total_ms: float) -> JsonObject:
    """Return the record of a job that was answered.

    Times are those of its first answer; ``memory_peak`` is the most that the server held so far.
    """
    first, times = results[0], results[0].timings_ms
    experts = [expert.ref for expert in first.planned.result.plan.experts]
    reasons = [result.generated.finish_reason for result in results]
    checked = [r.validation_passed for r in results if r.validation_passed is not None]
    return _record(job, total_ms) | {
        "router_latency_ms": round(times.get("route", 0.0), 3),
        "expert_load_latency_ms": round(times.get("load", 0.0), 3),
        "queue_latency_ms": round(times.get("queue", 0.0), 3),
        "inference_latency_ms": round(sum(times.get(name, 0.0) for name in _INFERENCE), 3),
        "ttft_ms": round(times["ttft"], 3),
        "experts_used": list[JsonValue](experts),
        "num_experts": len(experts),
        "memory_peak": first.memory.peak,
        "input_tokens": first.prompt_tokens,
        "kv_reused_tokens": first.kv_reused_tokens,
        "output_tokens": sum(len(result.generated.tokens) for result in results),
        "tokens_per_second": round(first.generated.tokens_per_s, 2),
        "finish_reasons": list[JsonValue](reasons),
        "success": _PARTIAL.isdisjoint(reasons),
        "validation_passed": all(checked) if checked else None,
    }


def failed(job: Job, error: ExpertError, *, total_ms: float) -> JsonObject:
    """Return the record of a job that failed."""
    return _record(job, total_ms) | {"error": error.code}


def _record(job: Job, total_ms: float) -> JsonObject:
    """Return the record of a job that is over, with nothing else known of it."""
    submitted = datetime.now(UTC) - timedelta(milliseconds=total_ms)
    return {
        "job": job.id,
        "owner": job.owner,
        "submitted_at": submitted.isoformat(timespec="milliseconds"),
        "router_latency_ms": None,
        "expert_load_latency_ms": None,
        "queue_latency_ms": None,
        "inference_latency_ms": None,
        "ttft_ms": None,
        "total_latency_ms": round(total_ms, 3),
        "experts_used": [],
        "num_experts": 0,
        "memory_peak": None,
        "input_tokens": None,
        "kv_reused_tokens": 0,
        "output_tokens": 0,
        "tokens_per_second": None,
        "finish_reasons": [],
        "success": False,
        "error": None,
        "validation_passed": None,
    }
