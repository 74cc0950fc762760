"""What is asked of the batch, and what comes back: events, each to the sink of its job."""

from collections.abc import Callable
from dataclasses import dataclass

from expertctl.engine.answer_form import Checked
from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.stop import USUAL_RULES, StopRules
from expertctl.errors import ExpertError
from expertctl.routing.plan import Plan

DEFAULT_PRIORITY = 5
"""Of 0 to 9; 9 is served first."""
Check = Callable[[str], Checked | str]
"""Tells whether an answer has the form that was asked for; called once, with the whole answer.

Where none was asked for, it returns the part of the answer that the usual check is for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that takes part in the batch, and its owner.

    Turns are fair among owners; the caller sees to it that keys of kept texts begin with ``owner``.
    ``deadline`` is a time of `time.monotonic`: what is there by then is the answer.
    """

    id: str
    request: RunRequest
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    texts: int = 1
    """How many answers, each drawn with a seed of its own."""
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each drawn one; None: no scores at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; None: they are not scored."""
    stop_rules: StopRules = USUAL_RULES
    remember: bool = True
    """Whether it counts as a use of its experts."""
    check: Check | None = None
    """None: the form that the experts or the prompt call for."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A token, its text as far as it has one, and the logarithm of its probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of an answer, and the likeliest ones in its place, the likeliest first."""

    chosen: Likely
    likeliest: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The plan is made and the prompt is being read."""

    plan: Plan
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that an earlier text of the same key and plan had read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that has become certain, the number of its answer, and its tokens if asked for.

    The text may be empty where there are tokens: theirs is not certain yet. The log-probabilities
    of the prompt come once, with the first piece of the first answer, however empty that is.
    """

    number: int
    text: str
    drawn: tuple[Drawn, ...] = ()
    written: int = 0
    """How many tokens of this answer there are by now."""
    prompt: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All answers of a job, in order."""

    results: tuple[RunResult, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no answer, or no more of it."""

    error: ExpertError


Event = Started | Piece | Finished | Failed
"""`Finished` or `Failed` comes last, and once; a job cancelled after it began gets `Finished`."""
Sink = Callable[[Event], None]
"""Called by the threads of the engine, one after the other; returns at once and never raises."""
