"""`DecisionCache`: plans that are returned again for the same prompt.

Prompts are the same when they differ in nothing but case and white space; digits, words and the
ends of lines count. So does what is read from spelling alone: whether a prompt has code.

A plan is not given again after `KEPT_SECONDS`: success rates fade with time, without any change.

What is kept does not grow with the length of prompts nor with the size of bases: of a prompt a
digest is kept, a plan is kept without the words that it was made from, and plans share the record
of their base.
"""

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from expertctl.routing.features import features_of
from expertctl.routing.planner import Planned
from expertctl.routing.request import RouteRequest
from expertctl.store.base_record import StoredBase

REMEMBERED = 2_000
"""How many plans are kept, the most recently asked for: 4 MB without experts, 30 MB with many."""
KEPT_SECONDS = 3_600.0
"""In an hour a success rate fades by a thousandth."""
KEPT = 16
"""How many candidates of a plan are kept: what the head compared, and a few more."""
_BLANK_LINES = re.compile(r"\s*\n\s*\n\s*")
_LINE_END = re.compile(r"[^\S\n]*\n[^\S\n]*")
_SPACES = re.compile(r"[^\S\n]+")


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is remembered by."""

    request: RouteRequest
    """Without a seed; its prompt is the SHA-256 of the normalised prompt."""
    base: str | None
    has_code: bool

    @classmethod
    def of(cls, request: RouteRequest, base: str | None) -> "Question":
        """Return what a request asks, however it is spelled."""
        spelled = normalised(request.prompt).encode("utf-8", "surrogatepass")
        asked = replace(request, prompt=hashlib.sha256(spelled).hexdigest(), seed=None)
        return cls(asked, base, features_of(request.prompt).has_code)


class DecisionCache:
    """Plans by question, of one state of what is installed and learnt."""

    def __init__(self, most: int = REMEMBERED, *, clock: Callable[[], float] = time.time) -> None:
        """Begin with nothing."""
        self.most = most
        self._clock = clock
        self._plans: OrderedDict[Question, tuple[float, Planned]] = OrderedDict()
        self._bases: dict[str, StoredBase] = {}
        """The record of each base, by name; each plan was made with a copy of its own."""
        self._revision: object = ""

    def __len__(self) -> int:
        """How many plans are kept."""
        return len(self._plans)

    def find(self, question: Question, *, revision: object) -> Planned | None:
        """Return what was planned of late; when something has changed, forget all instead."""
        if revision != self._revision:
            self._plans.clear()
            self._bases.clear()
            self._revision = revision
        at, planned = self._plans.get(question, (0.0, None))
        if planned is None or not 0 <= self._clock() - at < KEPT_SECONDS:
            self._plans.pop(question, None)
            return None
        self._plans.move_to_end(question)
        return planned

    def keep(self, question: Question, planned: Planned) -> None:
        """Remember a plan for as long as the revision that was last asked for holds."""
        base = self._shared(planned.base)
        self._plans[question] = (self._clock(), replace(_abridge(planned), base=base))
        self._plans.move_to_end(question)
        if len(self._plans) > self.most:
            self._plans.popitem(last=False)

    def check_integrity(self) -> None:
        """Check that no more is kept than is promised."""
        assert len(self._plans) <= self.most
        for _, planned in self._plans.values():
            assert len(planned.result.candidates) <= KEPT
            assert not planned.result.features.words

    def _shared(self, base: StoredBase) -> StoredBase:
        """Return the record of a base that other plans refer to, if it is the same."""
        known = self._bases.get(base.name)
        if known is None or known != base:
            known = self._bases[base.name] = base
        return known


def _abridge(planned: Planned) -> Planned:
    """Return a plan with its first candidates, without the words of its prompt."""
    result = planned.result
    features = replace(result.features, words=())
    abridged = replace(result, candidates=result.candidates[:KEPT], features=features)
    return replace(planned, result=abridged)


def normalised(prompt: str) -> str:
    """Return a prompt in one case, every run of white space in its shortest form."""
    lines = _LINE_END.sub("\n", _BLANK_LINES.sub("\n\n", prompt.strip()))
    return _SPACES.sub(" ", lines).casefold()


def as_asked(planned: Planned, request: RouteRequest, *, took_ms: float) -> Planned:
    """Return a remembered plan for this request: its own seed, length and time."""
    result = planned.result
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    return replace(
        planned,
        result=replace(
            result,
            plan=replace(result.plan, seed=seed),
            features=replace(result.features, length=len(request.prompt)),
            timings_ms={"remembered": took_ms, "total": took_ms},
        ),
    )
