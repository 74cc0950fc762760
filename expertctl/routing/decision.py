"""Deciding one prompt: search, vetoes, the head, and a score for every candidate.

Everything about an installed expert that does not depend on the prompt was worked out before
(`roster`), and nothing is put into words here (`router`), so the rest takes little longer than the
search.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from expertctl.routing.advice import COPIED
from expertctl.routing.candidate import Installed, veto
from expertctl.routing.composition import not_composing
from expertctl.routing.encoded import Encoded
from expertctl.routing.features import Features
from expertctl.routing.found import Found
from expertctl.routing.head import MANY, Verdict, judge, judge_all
from expertctl.routing.index import RoutingIndex
from expertctl.routing.roster import Roster
from expertctl.routing.score import DEFAULT_SUCCESS, THRESHOLD, Order, order_key, trusted
from expertctl.routing.vector_table import Rows, Vectors

ASKED_LAST = "its examples are about everything, so it is asked last"
"""Why a grab-all does not answer where another expert does."""

JOINS = 0.1
"""The least share, less any windfall, with which an expert joins one that it composes with."""

_WITHIN = 16
"""How many of the closest are looked at for partners."""

_SAME = 0.03
"""Scores further apart than this are not equal, however they are rounded."""

Success = Callable[[Installed], float | None]
"""How often an expert was judged good at what a prompt asks for; ``None`` without judgements."""


class Standing(NamedTuple):
    """What the head made of one candidate."""

    share: float
    support: float
    score: float


@dataclass(slots=True)
class Decision:
    """What was found for a prompt, and what it came to.

    ``standings`` and ``vetoes`` are by position in the index; a candidate without either was too
    far off. ``leader`` is the best candidate, if its score is enough.
    """

    found: Found
    standings: dict[int, Standing] = field(default_factory=dict)
    vetoes: dict[int, str] = field(default_factory=dict)
    leader: int | None = None


def decide(
    roster: Roster, index: RoutingIndex, features: Features, encoded: Encoded, success: Success
) -> Decision:
    """Say how well the experts that may answer suit a prompt, whose rows are given."""
    decision = Decision(index.search(encoded.rows[0], allowed=roster.allowed))
    running = _running(roster, decision, features)
    first = _less(running, roster.grabbing)
    if len(first):
        _judge(roster, index, decision, first, encoded, success)
    if len(first) == len(running):
        return decision
    if decision.leader is None:
        decision.standings.clear()
        _judge(roster, index, decision, running, encoded, success)
    else:
        decision.vetoes |= dict.fromkeys(set(running.tolist()) & roster.grabbing, ASKED_LAST)
    return decision


def _less(experts: Rows, some: frozenset[int]) -> Rows:
    """Leave out some experts; mostly there are none to leave out."""
    if not some or some.isdisjoint(experts.tolist()):
        return experts
    return np.array([at for at in experts.tolist() if at not in some], np.int64)


def _running(roster: Roster, decision: Decision, features: Features) -> Rows:
    """Return the candidates without those that refuse the prompt or copy another candidate."""
    experts = decision.found.experts
    some = experts.tolist()
    guarded = roster.speaking if features.script else roster.guarded
    for at in guarded.intersection(some):
        if why := veto(roster.by_position[at].manifest, features):
            decision.vetoes[at] = why
    if not roster.flagged.isdisjoint(some):
        decision.vetoes |= _copies(roster, [at for at in some if at not in decision.vetoes])
    if not decision.vetoes:
        return experts
    return np.array([at for at in some if at not in decision.vetoes], np.int64)


def _copies(roster: Roster, running: list[int]) -> dict[int, str]:
    """Return which candidates are copies of other candidates, each with a sentence saying so."""
    names = {str(roster.by_position[at].stored.package) for at in running}
    copies = {}
    for at in roster.flagged.intersection(running):
        expert = roster.by_position[at]
        others = {f.other for f in roster.flags[expert.digest] if f.code in COPIED} & names
        if others:
            copies[at] = f"it repeats what {min(filter(None, others))} says, which was here first"
    return copies


def _judge(
    roster: Roster,
    index: RoutingIndex,
    decision: Decision,
    running: Rows,
    encoded: Encoded,
    success: Success,
) -> None:
    """Let the head compare candidates, and name the best.

    Experts that compose do not compete: on a prompt for several of them, their shares are added
    and the sum counts for each.
    """
    joining = _may_join(roster, running)
    if joining:
        running = _closest(roster, running)
    looked_at = judge_all if joining else judge
    verdict = looked_at(roster.deep, roster.deep_at[running], encoded.deep[0])
    compared = running[: len(verdict)].tolist()
    _spread(roster, compared, verdict, encoded.deep[0])
    shares, evidence = verdict.shares.tolist(), verdict.evidence.tolist()
    together = _together(roster, compared, verdict) if joining else []
    left = min(sum(shares[number] for number in together), 1.0)
    for number in together:
        evidence[number] += max(left - shares[number], 0.0)
    calibration = index.calibration
    figures = zip(compared, shares, verdict.support.tolist(), evidence, strict=True)
    for at, share, support, enough in figures:
        rate = _rate(success, roster.by_position[at])
        score = trusted(calibration.score(enough), success=rate)
        decision.standings[at] = Standing(share, support, score)
    best = _best(roster, decision.standings, success)
    if decision.standings[best].score >= THRESHOLD:
        decision.leader = best


def _may_join(roster: Roster, running: Rows) -> bool:
    """Tell whether at least two of the closest may join others; a partner need not be close."""
    if not roster.composing:
        return False
    return len(roster.composing.intersection(running[:_WITHIN].tolist())) > 1


def _closest(roster: Roster, running: Rows) -> Rows:
    """Return the closest, then those further off that compose: other tasks may be closer."""
    behind = running[MANY.candidates : _WITHIN].tolist()
    partners = [at for at in behind if at in roster.composing]
    return np.array([*running[: MANY.candidates].tolist(), *partners], np.int64)


def _spread(roster: Roster, compared: list[int], verdict: Verdict, query: Vectors) -> None:
    """Support a grab-all by all of its texts: a few of them are close to any prompt."""
    for at in roster.grabbing.intersection(compared):
        rows = roster.deep.rows[roster.deep.rows_of(roster.deep_at[[at]])]
        verdict.support[compared.index(at)] = (rows @ query).mean()


def _best(roster: Roster, standings: Mapping[int, Standing], success: Success) -> int:
    """Return which candidate sorts first; only those with about the best score are compared."""
    enough = max(standing.score for standing in standings.values()) - _SAME
    equals = [at for at, standing in standings.items() if standing.score >= enough]
    if len(equals) == 1:
        return equals[0]
    return min(equals, key=lambda at: _order(roster, standings[at], at, success))


def _together(roster: Roster, compared: list[int], verdict: Verdict) -> list[int]:
    """Return the candidates that a prompt is for together: the best, and those that join it."""
    evidence = verdict.evidence.tolist()
    order = sorted(range(len(evidence)), key=evidence.__getitem__, reverse=True)
    together = order[:1]
    for number in order[1:]:
        if verdict.shares[number] - verdict.windfall < JOINS:
            continue
        others = [roster.by_position[compared[other]] for other in together]
        if not not_composing(roster.by_position[compared[number]], others, roster.gains):
            together.append(number)
    return together


def _rate(success: Success, expert: Installed) -> float:
    rate = success(expert)
    return DEFAULT_SUCCESS if rate is None else rate


def _order(roster: Roster, standing: Standing, at: int, success: Success) -> Order:
    expert = roster.by_position[at]
    return order_key(
        score=standing.score,
        flagged=at in roster.flagged,
        success=_rate(success, expert),
        priority=expert.manifest.routing.priority,
        vram_mb=expert.resident_bytes,
        name=expert.ref,
    )
