"""Results as the engine makes them, for what only looks at them."""

from typing import Any, cast

from expertctl.digest import Digest
from expertctl.engine.generate import FinishReason, Generated
from expertctl.engine.run_result import MemoryUse, Numerics, RunResult
from expertctl.engine.serving.job import Finished, Started
from expertctl.routing.features import features_of
from expertctl.routing.plan import Plan, SamplingParams
from expertctl.routing.planner import Planned
from expertctl.routing.router import RoutingResult

PROMPT = "Sort: 3, 1, 2"
PLAN = Plan(Digest.of(b"plan"), 1, "tiny", (), SamplingParams())
STARTED = Started(PLAN, 7, 0)


def finished(text: str, reason: FinishReason = "stop", *, job_id: str = "0" * 32) -> Finished:
    """The end of a job with one answer."""
    features = features_of(PROMPT, seen=PROMPT)
    routed = RoutingResult(PLAN, (), (), features, "lexical", (), (), {})
    generated = Generated(
        text=text,
        tokens=tuple(range(len(text))),
        finish_reason=reason,
        prefill_tokens=7,
        prefill_ms=2.0,
        first_token_ms=2.5,
        decode_ms=30.0,
        decode_steps=len(text),
    )
    result = RunResult(
        job_id=job_id,
        planned=Planned(routed, cast("Any", None), ()),
        dropped=(),
        generated=generated,
        validation_passed=None,
        prompt_tokens=7,
        timings_ms={"queue": 5.0, "route": 1.0, "load": 4.0, "prefill": 2.0, "decode": 30.0},
        memory=MemoryUse(1000, 500, {}),
        experts_loaded=0,
        kv_reused_tokens=0,
        numerics=Numerics("torch", "float32", "published", False),
        threads=1,
        warnings=(),
    )
    return Finished((result,))
