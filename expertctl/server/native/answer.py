"""The answer to ``/v1/infer``: the document of ``run --json``, and when and how it came about."""

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Finished, Piece, Started
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.json_filter import JsonFilter
from expertctl.server.native.call import Call


def answer_of(call: Call, finished: Finished) -> JsonObject:
    """Return the document (``schemas/infer.schema.json``)."""
    [result] = finished.results
    text, warnings = _said(call, result.generated.text)
    experts = result.planned.result.plan.experts
    return {
        **result.to_json(),
        "text": text,
        "warnings": [*call.warnings, *result.warnings, *warnings],
        "submitted_at": call.submitted_at,
        "tokens_generated": len(result.generated.tokens),
        "experts_used": list[JsonValue](expert.ref for expert in experts),
        "latency_ms": round(call.arrival.since_ms, 3),
        "stopped_by": result.generated.stopped_by,
        "stages": _stages(call, result),
    }


def started_of(call: Call, event: Started) -> JsonObject:
    """Return the first event of a stream."""
    return {
        "job_id": call.job.id,
        "submitted_at": call.submitted_at,
        "plan": event.plan.to_json(),
        "tokens": {"prompt": event.prompt_tokens, "reused": event.reused_tokens},
    }


def piece_of(event: Piece) -> JsonObject:
    """Return an event with more of the text."""
    return {"text": event.text}


def _said(call: Call, text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text that is given out, and warnings of what was removed from it."""
    if not call.json_asked:
        return text, ()
    json = JsonFilter()
    return json.push(text) + json.finish(), json.warnings


def _stages(call: Call, result: RunResult) -> JsonObject:
    """Return how long each stage took; waiting in the queue is no stage, and is in the timings."""
    took = result.timings_ms
    stages = {
        "reception": call.reception_ms,
        "reasoning": took.get("route", 0.0),
        "preparation": took.get("load", 0.0),
        "inference": took.get("prefill", 0.0) + took.get("decode", 0.0),
        "post_processing": took.get("post", 0.0),
    }
    return {name: round(ms, 3) for name, ms in stages.items()}
