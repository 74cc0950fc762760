"""One line of the log for each job: who answered, how long each stage took, what came of it.

Neither prompt nor answer is in it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Job
from expertctl.errors import ExpertError
from expertctl.schema.strict_json import JsonObject, JsonValue

_INFERENCE = ("prefill", "decode")


def answered(job: Job, results: Sequence[RunResult]) -> JsonObject:
    """Return the record of a job that was answered; times are those of its first answer."""
    first, times = results[0], results[0].timings_ms
    experts = [expert.ref for expert in first.planned.result.plan.experts]
    generated = [result.generated for result in results]
    checked = [r.validation_passed for r in results if r.validation_passed is not None]
    return {
        "job": job.id,
        "owner": job.owner,
        "submitted_at": _before(times["total"]),
        "router_latency_ms": round(times.get("route", 0.0), 3),
        "expert_load_latency_ms": round(times.get("load", 0.0), 3),
        "queue_latency_ms": round(times.get("queue", 0.0), 3),
        "inference_latency_ms": round(sum(times.get(name, 0.0) for name in _INFERENCE), 3),
        "ttft_ms": round(times["ttft"], 3),
        "total_latency_ms": round(times["total"], 3),
        "experts_used": list[JsonValue](experts),
        "num_experts": len(experts),
        "memory_peak": first.memory.peak,
        "input_tokens": first.prompt_tokens,
        "kv_reused_tokens": first.kv_reused_tokens,
        "output_tokens": sum(len(one.tokens) for one in generated),
        "tokens_per_second": round(first.generated.tokens_per_s, 2),
        "finish_reasons": list[JsonValue](one.finish_reason for one in generated),
        "success": True,
        "error": None,
        "validation_passed": all(checked) if checked else None,
    }


def failed(job: Job, error: ExpertError) -> JsonObject:
    """Return the record of a job that came to nothing."""
    return {"job": job.id, "owner": job.owner, "success": False, "error": error.code}


def _before(ms: float) -> str:
    """Return when something began that took so long until now."""
    now = datetime.now(UTC).timestamp()
    return datetime.fromtimestamp(now - ms / 1000, UTC).isoformat(timespec="milliseconds")
