"""Choosing: from measured candidates to the experts of a plan, each with its reason.

`choose` follows the scores, `choose_forced` the user. Both bring what an expert requires, and
neither mixes experts that exclude each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import (
    IncompatibleError,
    MissingDependencyError,
    RevokedError,
    UsageError,
)
from expertctl.routing.candidate import Candidate, Installed, evidence
from expertctl.routing.composition import (
    Gains,
    check_context,
    check_together,
    in_plan_order,
    not_composing,
    requirements_in,
    with_requirements,
)
from expertctl.routing.request import Forced, Target
from expertctl.routing.score import decided_tie
from expertctl.routing.suggestion import not_installed


@dataclass(frozen=True, slots=True)
class Choice:
    """An expert of the plan, its weight and reason; ``pulled`` if it is there only for another."""

    expert: Installed
    weight: float
    reason: str
    pulled: bool = False


class Selection:
    """The experts chosen so far for one plan, in order."""

    def __init__(
        self, usable: Sequence[Installed], *, max_experts: int, context: int, gains: Gains
    ) -> None:
        """Start with none; requirements are looked up among the usable experts."""
        self.usable = usable
        self.gains = gains
        self.max_experts = max_experts
        self.context = context
        self.choices: list[Choice] = []

    @property
    def experts(self) -> list[Installed]:
        """The chosen experts."""
        return [choice.expert for choice in self.choices]

    def add(self, choice: Choice) -> None:
        """Add an expert after whatever it requires, or nothing at all.

        Raises:
            MissingDependencyError: when something required cannot be used.
            IncompatibleError: when they may not stand in one plan.
        """
        present = {expert.digest for expert in self.experts}
        group = with_requirements(choice.expert, self.usable, present=self.experts)
        new = [expert for expert in group if expert.digest not in present]
        together = [*self.experts, *new]
        check_together(together)
        check_context(together, self.context)
        if len(together) > self.max_experts:
            raise IncompatibleError(
                f"{choice.expert.ref} would make a plan of {len(together)} experts, at most "
                f"{self.max_experts} are allowed",
                hint="raise --max-experts, or name fewer experts",
            )
        pulled = [_pulled(e, choice.expert) for e in new if e.digest != choice.expert.digest]
        self.choices += [*pulled, choice]

    def check_integrity(self) -> None:
        """Check that no expert is chosen twice and that all may stand together."""
        digests = [expert.digest for expert in self.experts]
        assert len(set(digests)) == len(digests) <= self.max_experts
        check_together(self.experts)


def choose(
    candidates: Sequence[Candidate],
    usable: Sequence[Installed],
    *,
    max_experts: int,
    context: int,
    gains: Gains,
) -> tuple[list[Choice], list[Candidate]]:
    """Choose among candidates, the best first; return the plan's experts and all decisions."""
    selection = Selection(usable, max_experts=max_experts, context=context, gains=gains)
    decided = [_decide(candidate, candidates, selection) for candidate in candidates]
    reasons = {choice.expert.digest: choice.reason for choice in selection.choices}
    ordered = in_plan_order(selection.experts)
    by_digest = {choice.expert.digest: choice for choice in selection.choices}
    return [by_digest[expert.digest] for expert in ordered], _told(decided, reasons)


def choose_forced(
    force: Sequence[Forced],
    installed: Sequence[Installed],
    usable: Sequence[Installed],
    *,
    context: int,
) -> list[Choice]:
    """Return the experts that the user names, in their order, and what they require.

    Raises:
        NotFoundError: when one is not installed.
        RevokedError: when the key of one was revoked.
        UsageError: when one is named twice.
        IncompatibleError: when they may not stand in one plan.
    """
    named = [(_named(forced.target, installed), forced.weight) for forced in force]
    digests = [expert.digest for expert, _ in named]
    for expert, _ in named:
        _check_forced(expert, digests)
    choices: list[Choice] = []
    for expert, weight in named:
        present = [*(e for e, _ in named), *(choice.expert for choice in choices)]
        for needed in with_requirements(expert, usable, present=present)[:-1]:
            if needed.digest not in {*digests, *(c.expert.digest for c in choices)}:
                choices.append(_pulled(needed, expert))
        choices.append(Choice(expert, weight, "named by the user"))
    experts = [choice.expert for choice in choices]
    check_together(experts)
    check_context([choice.expert for choice in choices if choice.weight != 0.0], context)
    _check_weights(choices)
    return choices


def is_excluded(expert: Installed, exclude: Sequence[Target]) -> bool:
    """Tell whether the user excluded an expert, prereleases of a named package included."""
    return any(_excludes(target, expert) for target in exclude)


def _excludes(target: Target, expert: Installed) -> bool:
    if isinstance(target, Digest) or target.digest or target.constraint.bounds:
        return expert.is_meant(target)
    return target.package == expert.stored.package


def _decide(
    candidate: Candidate, candidates: Sequence[Candidate], selection: Selection
) -> Candidate:
    """Choose one candidate if it may join those before it, else say why not."""
    present = selection.experts
    if candidate.refusal or candidate.expert.digest in {e.digest for e in present}:
        return candidate
    why_not = not_composing(candidate.expert, present, selection.gains)
    if why_not:
        return candidate.refused(f"{_standing(candidate, candidates, selection.gains)}; {why_not}")
    place = _joining(candidate, present) or _standing(candidate, candidates, selection.gains)
    reason = f"{place}: {evidence(candidate)}"
    try:
        selection.add(Choice(candidate.expert, 1.0, reason))
    except (IncompatibleError, MissingDependencyError) as error:
        return candidate.refused(error.message)
    return candidate.accepted(reason)


def _pulled(expert: Installed, dependant: Installed) -> Choice:
    return Choice(expert, 1.0, f"required by {dependant.ref}", pulled=True)


def _check_weights(choices: Sequence[Choice]) -> None:
    """Refuse a weight that an expert cannot have, and 0 for what another one requires."""
    for choice in choices:
        if choice.weight not in (0.0, 1.0) and choice.expert.manifest.virtual_tokens:
            raise IncompatibleError(
                f"{choice.expert.ref} has a soft prompt, which has no weight but 1",
                hint="name it without a weight, or with 0 to leave it out",
            )
    idle = [choice.expert for choice in choices if choice.weight == 0.0]
    for choice in choices:
        missed = requirements_in(choice.expert, idle) if choice.weight else []
        if missed:
            raise IncompatibleError(
                f"{choice.expert.ref} requires {missed[0].ref}, which has the weight 0 here",
                hint="give it another weight, or leave both out",
            )


def _told(decided: Sequence[Candidate], reasons: dict[Digest, str]) -> list[Candidate]:
    """Mark as chosen what came in as a requirement, whatever was decided about it before."""
    return [
        c if c.chosen or c.expert.digest not in reasons else c.accepted(reasons[c.expert.digest])
        for c in decided
    ]


def _joining(candidate: Candidate, present: Sequence[Installed]) -> str:
    """Say which expert a candidate joins; empty when it is the first."""
    return f"score {candidate.score:.2f}, joins {present[0].ref}" if present else ""


def _standing(candidate: Candidate, candidates: Sequence[Candidate], gains: Gains) -> str:
    """Return where a candidate ranks among those not refused, and what decided a tie."""
    able = [c for c in candidates if not c.refusal]
    place = able.index(candidate)
    if place == 0:
        rivals = [c for c in able[1:] if not_composing(c.expert, [candidate.expert], gains)]
        second = rivals[0] if rivals else None
        tie = _tie(candidate, second, "same score as") if second else ""
        return f"best of {len(candidates)}, score {candidate.score:.2f}{tie}"
    tie = _tie(able[0], candidate, "same score, which goes first")
    return f"score {candidate.score:.2f}, behind {able[0].expert.ref}{tie}"


def _tie(first: Candidate, second: Candidate, words: str) -> str:
    """Say what put one of two equal scores first; empty when they are not equal."""
    decided_by = decided_tie(first.order[-1], second.order[-1])
    other = f" {second.expert.ref}" if words.endswith("as") else ""
    return f" ({words}{other}, by {decided_by})" if decided_by else ""


def _named(target: Target, installed: Sequence[Installed]) -> Installed:
    found = [expert for expert in installed if expert.is_meant(target)]
    if not found:
        raise not_installed(target, installed)
    return max(found, key=lambda expert: expert.precedence)


def _check_forced(expert: Installed, digests: Sequence[Digest]) -> None:
    if expert.revoked:
        raise RevokedError(
            f"{expert.ref}: the key that signed it was revoked",
            hint="install a version that its publisher has signed anew",
        )
    if digests.count(expert.digest) > 1:
        raise UsageError(f"{expert.ref} is named twice", hint="give it one weight instead")
