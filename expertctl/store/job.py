"""`Job`: one remembered run: which experts answered, how long it took, how it was judged.

It never contains the prompt or the answer.
"""

from dataclasses import dataclass
from typing import Literal

from expertctl.digest import Digest
from expertctl.store.success import Evidence

Verdict = Literal["good", "bad"]
Validation = Literal["passed", "failed"]
FAILED = "error"
"""The ``finish_reason`` of a run that ended with an error."""
CUT = "length"
"""That of an answer that had no room to end; the experts are not to blame for its form."""

SAID = 1.0
"""What a user's judgement counts as evidence."""
PASSED = 0.25
FAILED_VALIDATION = 0.5
"""Form counts less than a judgement: an answer may be well-formed and wrong."""


@dataclass(frozen=True, slots=True)
class UsedExpert:
    """An expert that took part in a run."""

    ref: str
    content_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Milliseconds of the steps of a run; `None` for one that was not reached."""

    route: float | None = None
    load: float | None = None
    ttft: float | None = None
    decode: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """What a run read and how fast it was; sizes are bytes."""

    prefill_ms: float
    prefill_tokens: int
    """Tokens that were read, virtual ones included, those reused from the KV cache excluded."""
    kv_reused_tokens: int
    decode_steps: int
    threads: int
    ssd_bytes: int
    """The bytes read from files into memory."""
    ram_bytes: int
    """The bytes made from them for the device to compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, named by its ``job_id`` or the beginning of it."""

    job_id: str
    at: float
    """Seconds since the epoch, at its end."""
    task: str
    base: str
    experts: tuple[UsedExpert, ...]
    finish_reason: str
    validation: Validation | None = None
    verdict: Verdict | None = None
    judged_at: float | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    times: JobTimes = JobTimes()
    figures: JobFigures | None = None
    """None for a run that failed, or that took place before figures were kept."""
    blamed: bool = False
    """Whether it ended with an error that the experts are to blame for."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the prompt was read, where that is known."""
        if self.figures is None:
            return None
        return _per_second(self.figures.prefill_tokens, self.figures.prefill_ms)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """How fast the answer was written, where that is known; a single token gives no rate."""
        if self.figures is None or self.times.decode is None:
            return None
        return _per_second(self.figures.decode_steps, self.times.decode)

    @property
    def evidence(self) -> Evidence:
        """What the run says of its experts together; a user's judgement replaces all else."""
        at = self.at if self.judged_at is None else self.judged_at
        if self.verdict == "good":
            return Evidence(at=at, good=SAID)
        if self.verdict == "bad" or self.blamed:
            return Evidence(at=at, bad=SAID)
        if self.validation == "passed":
            return Evidence(at=at, well_formed=PASSED)
        if self.validation == "failed" and self.finish_reason != CUT:
            return Evidence(at=at, malformed=FAILED_VALIDATION)
        return Evidence(at=at)

    @property
    def outcome(self) -> Verdict | None:
        """Whether the run went well, as far as is known."""
        found = self.evidence
        if not found:
            return None
        return "good" if found.good or found.well_formed else "bad"


def _per_second(count: int, ms: float) -> float | None:
    return count / ms * 1e3 if count and ms > 0 else None
