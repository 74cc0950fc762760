"""Deciding one prompt: search, vetoes, the head, and a score for every candidate.

Everything that an installed expert knows of itself was worked out before (`roster`), and nothing is
put into words here (`router`), so that what is left takes little longer than the search.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from expertctl.routing.candidate import Installed, veto
from expertctl.routing.composition import not_composing
from expertctl.routing.encoded import Encoded
from expertctl.routing.features import Features
from expertctl.routing.found import Found
from expertctl.routing.head import judge
from expertctl.routing.index import RoutingIndex
from expertctl.routing.roster import Roster
from expertctl.routing.score import DEFAULT_SUCCESS, THRESHOLD, Order, order_key, trusted
from expertctl.routing.vector_table import Rows

COPIED = {"copied", "near-copy"}
"""The flags of an expert that repeats another one."""

Success = Callable[[Installed], float | None]
"""How often an expert was judged good at what a prompt asks for; ``None`` when nobody judged."""


@dataclass(frozen=True, slots=True)
class Standing:
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
    if len(running):
        _judge(roster, index, decision, running, encoded, success)
    if decision.leader is not None:
        _judge_joiners(roster, index, decision, decision.leader, running, encoded, success)
    return decision


def _running(roster: Roster, decision: Decision, features: Features) -> Rows:
    """Return the candidates less those that refuse the prompt, and copies of others of them."""
    experts = decision.found.experts
    some = experts.tolist()
    for at in some:
        if at in roster.guarded and (why := veto(roster.by_position[at].manifest, features)):
            decision.vetoes[at] = why
    if not roster.flagged.isdisjoint(some):
        decision.vetoes |= _copies(roster, [at for at in some if at not in decision.vetoes])
    if not decision.vetoes:
        return experts
    return np.array([at for at in some if at not in decision.vetoes], np.int64)


def _copies(roster: Roster, running: list[int]) -> dict[int, str]:
    """Return which candidates are copies of others of them, and say so."""
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
    """Let the head compare candidates, and name the best."""
    decision.standings = _standings(roster, index, running, encoded, success)
    best = min(
        decision.standings, key=lambda at: _order(roster, decision.standings[at], at, success)
    )
    if decision.standings[best].score >= THRESHOLD:
        decision.leader = best


def _judge_joiners(
    roster: Roster,
    index: RoutingIndex,
    decision: Decision,
    leader: int,
    running: Rows,
    encoded: Encoded,
    success: Success,
) -> None:
    """Compare those that may join the leader without it: who composes does not compete."""
    chosen = [leader]
    while True:
        experts = [roster.by_position[at] for at in chosen]
        left = running[~np.isin(running, chosen)]
        able = [at for at in left.tolist() if _joins(roster, at, experts)]
        if not able:
            return
        standings = _standings(roster, index, left, encoded, success)
        best = max(able, key=lambda at: standings[at].score if at in standings else -1.0)
        if best not in standings:
            return
        decision.standings[best] = standings[best]
        if standings[best].score < THRESHOLD:
            return
        chosen.append(best)


def _joins(roster: Roster, at: int, experts: list[Installed]) -> bool:
    return not not_composing(roster.by_position[at], experts, roster.gains)


def _standings(
    roster: Roster, index: RoutingIndex, running: Rows, encoded: Encoded, success: Success
) -> dict[int, Standing]:
    verdict = judge(roster.deep, roster.deep_at[running], encoded.deep[0])
    scores = index.calibration.score(verdict.evidence).tolist()
    figures = zip(
        running.tolist(), verdict.shares.tolist(), verdict.support.tolist(), scores, strict=False
    )
    return {
        at: Standing(share, support, trusted(score, success=_rate(success, roster.by_position[at])))
        for at, share, support, score in figures
    }


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
