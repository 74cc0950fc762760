"""Selection: from scored candidates to the experts of a plan, in order, each with its reason.

Composition is a capability, not a default: a second expert joins only if the ``composes_with`` of
each names the ``role`` of the other, or if the pair was measured to improve results. What an expert
requires is added before it, regardless of ``load_order``; experts named by the user keep the user's
order.

`select_experts` follows the scores, `select_forced` the user. Both add requirements, and neither
combines experts that conflict. The module also suggests names for experts that are not installed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    IncompatibleError,
    MissingDependencyError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.reference import PackageName, Reference, Target
from expertctl.routing.candidate import (
    InstalledExpert,
    PairGains,
    RoutingCandidate,
    describe_evidence,
    matches_target,
)
from expertctl.routing.request import ForcedExpert
from expertctl.routing.score import explain_tie
from expertctl.store.store import find_similar_names

MAX_CHAIN_LENGTH = 10
"""The largest number of experts in a plan."""
_CONFLICT_HINT = "name one of them, or leave one out with --exclude"


_Available = tuple[Sequence[InstalledExpert], Sequence[InstalledExpert]]
"""The experts in the plan so far, and all usable experts."""


def resolve_requirements(
    expert: InstalledExpert,
    usable: Sequence[InstalledExpert],
    *,
    present: Sequence[InstalledExpert] = (),
) -> list[InstalledExpert]:
    """Return an expert with all its requirements, requirements first.

    A version in ``present`` satisfies a requirement; otherwise the newest usable one is taken.

    Raises:
        MissingDependencyError: when a requirement is not among the usable experts.
        IncompatibleError: when there are more requirements than any plan may have.
    """
    needed: dict[str, InstalledExpert] = {}
    _collect_requirements(expert, (present, usable), needed)
    return [*(e for e in needed.values() if e.digest != expert.digest), expert]


def check_conflicts(experts: Sequence[InstalledExpert]) -> None:
    """Check that no two experts conflict and that every expert allows a plan of this length.

    Raises:
        ConflictError: naming the two.
        IncompatibleError: naming the expert that allows fewer.
    """
    for i, one in enumerate(experts):
        for other in experts[i + 1 :]:
            _check_conflict(one, other)
    for expert in experts:
        most = expert.manifest.composition.max_chain
        if len(experts) > most:
            message = f"{expert.ref} allows at most {most} experts in a plan"
            hint = "name fewer, or leave it out"
            raise IncompatibleError(f"{message}, this one has {len(experts)}", hint=hint)


def check_context(experts: Sequence[InstalledExpert], context: int) -> None:
    """Check that the soft prompts of these experts leave room in the context of a base.

    Raises:
        IncompatibleError: when they do not; ``context`` is in tokens.
    """
    tokens = sum(expert.manifest.virtual_tokens for expert in experts)
    if tokens >= context:
        names = ", ".join(expert.ref for expert in experts if expert.manifest.virtual_tokens)
        raise IncompatibleError(
            f"{names}: {tokens} virtual tokens, the base reads {context} tokens in all",
            hint="use fewer experts with soft prompts",
        )


def explain_not_composing(
    newcomer: InstalledExpert, chosen: Iterable[InstalledExpert], gains: PairGains
) -> str:
    """Return why an expert may not join others automatically; empty when it may."""
    for other in chosen:
        if _has_measured_gain(newcomer, other, gains):
            continue
        for one, two in ((newcomer, other), (other, newcomer)):
            role = two.manifest.composition.role
            if role is None or role not in one.manifest.composition.composes_with:
                return f"{one.ref} does not declare that it composes with {two.ref}"
    return ""


def _has_measured_gain(one: InstalledExpert, two: InstalledExpert, gains: PairGains) -> bool:
    return any(
        gains.get(pair, 0) > 0 for pair in ((one.digest, two.digest), (two.digest, one.digest))
    )


def sort_by_load_order(experts: Iterable[InstalledExpert]) -> list[InstalledExpert]:
    """Sort by ``load_order``, with requirements before their dependents; the sort is stable."""
    waiting = sorted(experts, key=lambda expert: expert.manifest.composition.load_order)
    placed: dict[str, InstalledExpert] = {}
    for expert in waiting:
        _place_expert(expert, waiting, placed)
    return list(placed.values())


def find_requirements(
    expert: InstalledExpert, experts: Iterable[InstalledExpert]
) -> list[InstalledExpert]:
    """Return those of ``experts`` that an expert requires."""
    wanted = [Reference.parse(text) for text in expert.manifest.composition.requires]
    return [other for other in experts if any(map(other.matches, wanted))]


def _place_expert(
    expert: InstalledExpert, experts: Sequence[InstalledExpert], placed: dict[str, InstalledExpert]
) -> None:
    """Insert an expert after its requirements; cycles are broken arbitrarily."""
    if expert.ref in placed:
        return
    placed[expert.ref] = expert
    for needed in find_requirements(expert, experts):
        _place_expert(needed, experts, placed)
    placed[expert.ref] = placed.pop(expert.ref)


def _collect_requirements(
    expert: InstalledExpert, offered: _Available, needed: dict[str, InstalledExpert]
) -> None:
    if expert.ref in needed:
        return
    needed[expert.ref] = expert
    if len(needed) > MAX_CHAIN_LENGTH:
        first = next(iter(needed))
        raise IncompatibleError(
            f"{first} with all its requirements is more than {MAX_CHAIN_LENGTH} experts",
            hint="its publisher has to require fewer",
        )
    for text in expert.manifest.composition.requires:
        _collect_requirements(_find_required(expert, text, offered), offered, needed)
    needed[expert.ref] = needed.pop(expert.ref)  # after what it requires


def _find_required(expert: InstalledExpert, text: str, offered: _Available) -> InstalledExpert:
    wanted = Reference.parse(text)
    found = next(filter(None, ([e for e in some if e.matches(wanted)] for some in offered)), None)
    if found is None:
        raise MissingDependencyError(
            f"{expert.ref} requires {text}, and no such expert can be used",
            hint=f"install it: `expertctl install {text}`",
        )
    return max(found, key=lambda e: e.precedence)


def _check_conflict(one: InstalledExpert, other: InstalledExpert) -> None:
    for a, b in ((one, other), (other, one)):
        hits = [t for t in a.manifest.composition.conflicts if b.matches(Reference.parse(t))]
        if hits:
            message = f"{a.ref} conflicts with {b.ref}: it declares {hits[0]}"
            raise ConflictError(message, hint=_CONFLICT_HINT)
    if one.stored.package == other.stored.package:
        message = f"{one.ref} and {other.ref} are versions of one package"
        raise ConflictError(message, hint=_CONFLICT_HINT)


_MAX_SUGGESTIONS = 3


def find_near_names(name: PackageName, known: Iterable[PackageName]) -> list[str]:
    """Return up to three names: the same name in other namespaces, then similar spellings."""
    others = sorted(set(known) - {name})
    twins = [str(other) for other in others if other.name == name.name]
    near = find_similar_names(str(name), map(str, others)) if len(twins) < _MAX_SUGGESTIONS else []
    return list(dict.fromkeys([*twins, *near]))[:_MAX_SUGGESTIONS]


def format_suggestion(name: PackageName, known: Iterable[PackageName]) -> str:
    """Return "did you mean …?" with similar names; empty when there are none."""
    near = find_near_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def not_installed_error(target: Target, installed: Sequence[InstalledExpert]) -> NotFoundError:
    """Return the error for a named expert that is not installed, with a hint."""
    hint = _suggest_alternative(target, installed) or "`expertctl list` shows what is installed"
    return NotFoundError(f"{target} is not installed", hint=hint)


def list_unused_exclusions(
    exclude: Sequence[Target], installed: Sequence[InstalledExpert]
) -> list[str]:
    """Return warnings about exclusions that match no installed expert."""
    idle = [t for t in exclude if not any(matches_target(t, expert) for expert in installed)]
    return [_describe_unused(target, installed) for target in idle]


def _describe_unused(target: Target, installed: Sequence[InstalledExpert]) -> str:
    way_out = _suggest_alternative(target, installed)
    tail = f"; {way_out}" if way_out else ""
    return f"{target} is excluded, and no such expert is installed{tail}"


def _suggest_alternative(target: Target, installed: Sequence[InstalledExpert]) -> str:
    if isinstance(target, Digest):
        return "`expertctl list --json` shows digests"
    versions = {e.stored.version for e in installed if e.stored.package == target.package}
    if versions:
        return f"installed: {', '.join(map(str, sorted(versions)))}"
    return format_suggestion(target.package, (expert.stored.package for expert in installed))


@dataclass(frozen=True, slots=True)
class SelectedExpert:
    """An expert of the plan; ``is_dependency`` if it is there only because another requires it."""

    expert: InstalledExpert
    weight: float
    reason: str
    is_dependency: bool = False


class PlanSelection:
    """The experts selected so far for one plan, in order."""

    def __init__(
        self, usable: Sequence[InstalledExpert], *, max_experts: int, context: int, gains: PairGains
    ) -> None:
        """Start empty; requirements are looked up among the usable experts."""
        self.usable = usable
        self.gains = gains
        self.max_experts = max_experts
        self.context = context
        self.choices: list[SelectedExpert] = []

    @property
    def experts(self) -> list[InstalledExpert]:
        """The chosen experts."""
        return [choice.expert for choice in self.choices]

    def add(self, choice: SelectedExpert) -> None:
        """Add an expert after its requirements; on error nothing is added.

        Raises:
            MissingDependencyError: when a requirement cannot be used.
            IncompatibleError: when the experts may not be in one plan.
        """
        present = {expert.digest for expert in self.experts}
        group = resolve_requirements(choice.expert, self.usable, present=self.experts)
        new = [expert for expert in group if expert.digest not in present]
        together = [*self.experts, *new]
        check_conflicts(together)
        check_context(together, self.context)
        if len(together) > self.max_experts:
            raise IncompatibleError(
                f"{choice.expert.ref} would make a plan of {len(together)} experts, at most "
                f"{self.max_experts} are allowed",
                hint="raise --max-experts, or name fewer experts",
            )
        pulled = [_as_dependency(e, choice.expert) for e in new if e.digest != choice.expert.digest]
        self.choices += [*pulled, choice]

    def check_integrity(self) -> None:
        """Check that no expert is selected twice and that none conflict."""
        digests = [expert.digest for expert in self.experts]
        assert len(set(digests)) == len(digests) <= self.max_experts
        check_conflicts(self.experts)


def select_experts(
    candidates: Sequence[RoutingCandidate],
    usable: Sequence[InstalledExpert],
    *,
    max_experts: int,
    context: int,
    gains: PairGains,
) -> tuple[list[SelectedExpert], list[RoutingCandidate]]:
    """Select among candidates, best first; return the plan's experts and all decisions."""
    selection = PlanSelection(usable, max_experts=max_experts, context=context, gains=gains)
    decided = [_decide_candidate(candidate, candidates, selection) for candidate in candidates]
    reasons = {choice.expert.digest: choice.reason for choice in selection.choices}
    ordered = sort_by_load_order(selection.experts)
    by_digest = {choice.expert.digest: choice for choice in selection.choices}
    return [by_digest[expert.digest] for expert in ordered], _mark_dependencies(decided, reasons)


def select_forced(
    force: Sequence[ForcedExpert],
    installed: Sequence[InstalledExpert],
    usable: Sequence[InstalledExpert],
    *,
    context: int,
) -> list[SelectedExpert]:
    """Return the experts named by the user, in that order, with their requirements.

    Raises:
        NotFoundError: when one is not installed.
        RevokedError: when the signing key of one was revoked.
        UsageError: when one is named twice.
        IncompatibleError: when they may not be in one plan.
    """
    named = [(_find_named(forced.target, installed), forced.weight) for forced in force]
    digests = [expert.digest for expert, _ in named]
    for expert, _ in named:
        _check_forced(expert, digests)
    choices: list[SelectedExpert] = []
    for expert, weight in named:
        present = [*(e for e, _ in named), *(choice.expert for choice in choices)]
        for needed in resolve_requirements(expert, usable, present=present)[:-1]:
            if needed.digest not in {*digests, *(c.expert.digest for c in choices)}:
                choices.append(_as_dependency(needed, expert))
        choices.append(SelectedExpert(expert, weight, "named by the user"))
    check_conflicts([choice.expert for choice in choices])
    check_context([choice.expert for choice in choices if choice.weight != 0.0], context)
    _check_weights(choices)
    return choices


def _decide_candidate(
    candidate: RoutingCandidate, candidates: Sequence[RoutingCandidate], selection: PlanSelection
) -> RoutingCandidate:
    present = selection.experts
    if candidate.rejection or candidate.expert.digest in {e.digest for e in present}:
        return candidate
    why_not = explain_not_composing(candidate.expert, present, selection.gains)
    if why_not:
        return candidate.mark_rejected(
            f"{_describe_rank(candidate, candidates, selection.gains)}; {why_not}"
        )
    place = _explain_joining(candidate, present) or _describe_rank(
        candidate, candidates, selection.gains
    )
    reason = f"{place}: {describe_evidence(candidate)}"
    try:
        selection.add(SelectedExpert(candidate.expert, 1.0, reason))
    except (IncompatibleError, MissingDependencyError) as error:
        return candidate.mark_rejected(error.message)
    return candidate.mark_accepted(reason)


def _as_dependency(expert: InstalledExpert, dependant: InstalledExpert) -> SelectedExpert:
    return SelectedExpert(expert, 1.0, f"required by {dependant.ref}", is_dependency=True)


def _check_weights(choices: Sequence[SelectedExpert]) -> None:
    """Reject a weight that an expert cannot have, and 0 for a required expert."""
    for choice in choices:
        if choice.weight not in (0.0, 1.0) and choice.expert.manifest.virtual_tokens:
            raise IncompatibleError(
                f"{choice.expert.ref} has a soft prompt, which has no weight but 1",
                hint="name it without a weight, or with 0 to leave it out",
            )
    idle = [choice.expert for choice in choices if choice.weight == 0.0]
    for choice in choices:
        missed = find_requirements(choice.expert, idle) if choice.weight else []
        if missed:
            raise IncompatibleError(
                f"{choice.expert.ref} requires {missed[0].ref}, which has the weight 0 here",
                hint="give it another weight, or leave both out",
            )


def _mark_dependencies(
    decided: Sequence[RoutingCandidate], reasons: dict[Digest, str]
) -> list[RoutingCandidate]:
    """Mark the selected requirements as accepted, whatever was decided about them before."""
    return [
        c
        if c.chosen or c.expert.digest not in reasons
        else c.mark_accepted(reasons[c.expert.digest])
        for c in decided
    ]


def _explain_joining(candidate: RoutingCandidate, present: Sequence[InstalledExpert]) -> str:
    """Return which expert a candidate joins; empty for the first."""
    return f"score {candidate.score:.2f}, joins {present[0].ref}" if present else ""


def _describe_rank(
    candidate: RoutingCandidate, candidates: Sequence[RoutingCandidate], gains: PairGains
) -> str:
    """Return the rank of a candidate among those not rejected, and what decided a tie."""
    able = [c for c in candidates if not c.rejection]
    place = able.index(candidate)
    if place == 0:
        rivals = [c for c in able[1:] if explain_not_composing(c.expert, [candidate.expert], gains)]
        second = rivals[0] if rivals else None
        tie = _describe_tie(candidate, second, "same score as") if second else ""
        compared = sum(not c.is_ineligible for c in candidates)
        return f"best of {compared}, score {candidate.score:.2f}{tie}"
    tie = _describe_tie(able[0], candidate, "same score, which goes first")
    return f"score {candidate.score:.2f}, behind {able[0].expert.ref}{tie}"


def _describe_tie(first: RoutingCandidate, second: RoutingCandidate, words: str) -> str:
    """Return what decided between two equal scores; empty when they differ."""
    decided_by = explain_tie(first.sort_key[-1], second.sort_key[-1])
    other = f" {second.expert.ref}" if words.endswith("as") else ""
    return f" ({words}{other}, by {decided_by})" if decided_by else ""


def _find_named(target: Target, installed: Sequence[InstalledExpert]) -> InstalledExpert:
    found = [expert for expert in installed if expert.matches(target)]
    if not found:
        raise not_installed_error(target, installed)
    return max(found, key=lambda expert: expert.precedence)


def _check_forced(expert: InstalledExpert, digests: Sequence[Digest]) -> None:
    if expert.revoked:
        raise RevokedError(
            f"{expert.ref}: the key that signed it was revoked",
            hint="install a version that its publisher has signed again",
        )
    if digests.count(expert.digest) > 1:
        raise UsageError(f"{expert.ref} is named twice", hint="give it one weight instead")
