"""A further prompt of a conversation: it is routed again, and without an expert the base answers.

A short prompt ("And 9, 8, 7") and one that refers to what was said before ("Now the other way
round") name nothing to choose an expert by: for these the experts of the turn before stay.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from expertctl.errors import NotFoundError
from expertctl.routing.candidate import Installed
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Planned
from expertctl.routing.request import Forced, RouteRequest
from expertctl.routing.session import PlanningSession
from expertctl.store.store import Store

KEPT = "kept from the turn before"
SHORT = 3
"""A prompt of so few words is a follow-up, whatever it says."""
MAX_REFERRING_WORDS = 25
"""A longer prompt says what it is about, even if it refers to something."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_DENSE = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Letters of scripts that put no space between words."""
_SEPARATOR = re.compile(r"[,;\n]")
_PRONOUN = (
    r"(?:it|that|this|them|these|those)(?=\s*(?:$|[.!?,;)])"
    r"|\s+(?:again|as|in|into|to|with|for|more|less|one|once|instead|please|shorter|longer)\b)"
)
_REFERRING = re.compile(
    r"^\W*(?:and|but|or|also|again|instead|same|und|aber|oder|auch|noch|et|mais|ou|encore|y"
    r"|pero|mas|maar|nog|(?:what|how)\s+about|what\s+if"
    r"|(?:no|yes)(?=\s*(?:$|[,.!;:])|\s+(?:i|but|not)\b))\b"
    rf"|\w\s+{_PRONOUN}"
    r"|^\W*(?:please\s+)?(?:continue|go\s+on)\b"
    r"|\b(?:again|instead(?!\s+of)|(?<!no\s)(?:shorter|longer)(?!\s+than)|(?:once|one)\s+more"
    r"|another\s+one|the\s+same|vice\s+versa"
    r"|the\s+(?:other|first|second|third|last|next|previous)\s+(?:(?:way|one|order)|two(?!\s+\w))"
    r"|your\s+(?:(?:last|previous|first)\s+)?(?:answer|reply|result)"
    r"|the\s+(?:(?:last|previous|first)\s+)?(?:answer|reply|result)(?!\s+(?:of|to|when|if))"
    r"|the\s+above|above(?=\s*(?:$|[.!?,;:)]))"
    r"|kürzer|länger|nochmals?|noch\s+einmal|stattdessen|umgekehrt"
    r"|plus\s+court|encore\s+une\s+fois|más\s+corto|otra\s+vez|de\s+nuevo"
    r"|più\s+corto|di\s+nuovo|mais\s+curto|korter|opnieuw|andersom)\b",
    re.I,
)


def is_follow_up(prompt: str) -> bool:
    """Tell whether a prompt needs what was said before: it is short, only data, or refers to it."""
    count = _words(prompt)
    if count <= SHORT:
        return True
    pieces = _SEPARATOR.split(prompt)
    if len(pieces) > 1 and all(_words(piece) <= 2 for piece in pieces):
        return True
    return count <= MAX_REFERRING_WORDS and _REFERRING.search(prompt) is not None


def _words(text: str) -> int:
    """Count the words of a text, numbers aside; two letters of a dense script count as one."""
    dense = len(_DENSE.findall(text))
    return len(_WORD.findall(_DENSE.sub(" ", text))) + (dense + 1) // 2


def plan_follow_up(
    session: PlanningSession,
    request: RouteRequest,
    before: Plan,
    *,
    base: str | None = None,
    files: Sequence[Installed] = (),
) -> Planned:
    """Plan a prompt that follows one answered by the plan ``before``.

    Raises:
        ExpertError: as `PlanningSession.recall` does, also when an expert of that plan is gone.
    """
    planned = session.recall(request, base=base, files=files)
    if planned.experts or request.base_alone or not before.experts:
        return planned
    if not is_follow_up(request.prompt):
        return planned
    _demand_installed(session.planner.store, before)
    force = tuple(Forced(expert.content_digest, expert.weight) for expert in before.experts)
    kept = session.recall(replace(request, force=force), base=base or before.base, files=files)
    experts = tuple(replace(expert, reason=KEPT) for expert in kept.result.plan.experts)
    result = replace(
        kept.result,
        plan=replace(kept.result.plan, experts=experts),
        candidates=tuple(candidate.accepted(KEPT) for candidate in kept.result.candidates),
    )
    return replace(kept, result=result)


def _demand_installed(store: Store, plan: Plan) -> None:
    """Demand the experts of a plan, found by digest; the error names the one that is gone."""
    for expert in plan.experts:
        try:
            store.find(expert.content_digest)
        except NotFoundError as error:
            raise NotFoundError(
                f"{expert.ref}, which answered the turn before, is not installed any more",
                hint="begin anew, or name the experts that shall answer",
            ) from error
