"""`PlanningSession`: planning many prompts on one home, reading again only what has changed.

The installed experts are read again when any process added or removed one, changed trust, learnt
that one was yanked, or changed a lock file or list that pins an exact version. The eligible experts
are computed once for each base and set of options, until one of these, the vectors or the usage
statistics change. The same holds for plans in the `PlanCache`.

Prompts share a cached plan if they differ only in case and white space; digits, words and line ends
count, and so does whether a prompt contains code. Plans expire after `CACHE_SECONDS`, because
success rates decay with time alone. The size of the cache depends neither on the length of prompts
nor on the size of bases: it stores a digest of the prompt and a plan without the prompt's words,
and plans share the record of their base.

A follow-up prompt of a conversation (`plan_follow_up`) is routed again. If the base would then
answer alone and the prompt is short ("And 9, 8, 7") or refers to what was said before ("Now the
other way round"), the experts of the previous turn stay.
"""

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expertctl.errors import NotFoundError
from expertctl.routing.candidate import EligibleExperts, InstalledExpert
from expertctl.routing.features import extract_features
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Inventory, PlannedPrompt, Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.disk import stat_fingerprint
from expertctl.store.pins import PinFiles
from expertctl.store.preference import FLAGS_FILE as FLAGGED_FILE
from expertctl.store.store import Store

CACHE_CAPACITY = 2_000
"""The number of plans in the cache (LRU): 4 MB without experts, 30 MB with many."""
CACHE_SECONDS = 3_600.0
"""The lifetime of a plan, in seconds; in an hour a success rate decays by a thousandth."""
KEPT_CANDIDATES = 16
"""How many candidates of a plan are cached: those the reranker compared, and a few more."""
_BLANK_LINES = re.compile(r"\s*\n\s*\n\s*")
_LINE_END = re.compile(r"[^\S\n]*\n[^\S\n]*")
_SPACES = re.compile(r"[^\S\n]+")


@dataclass(frozen=True, slots=True)
class PlanCacheKey:
    """The cache key of a plan."""

    request: RouteRequest
    """The request without its seed; the prompt is the SHA-256 of the folded prompt."""
    base: str | None
    has_code: bool

    @classmethod
    def from_request(cls, request: RouteRequest, base: str | None) -> "PlanCacheKey":
        """Return the key of a request."""
        spelled = fold_prompt(request.prompt).encode("utf-8", "surrogatepass")
        folded = replace(request, prompt=hashlib.sha256(spelled).hexdigest(), seed=None)
        return cls(folded, base, extract_features(request.prompt).has_code)


class PlanCache:
    """Plans by request, valid for one revision of the installed experts and the statistics."""

    def __init__(
        self, capacity: int = CACHE_CAPACITY, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Create an empty cache; ``clock`` returns seconds."""
        self.most = capacity
        self._clock = clock
        self._plans: OrderedDict[PlanCacheKey, tuple[float, PlannedPrompt]] = OrderedDict()
        self._bases: dict[str, StoredBase] = {}
        """The record of each base by name; plans come with copies of their own."""
        self._revision: object = ""

    def __len__(self) -> int:
        """Return the number of cached plans."""
        return len(self._plans)

    def find_plan(self, question: PlanCacheKey, *, revision: object) -> PlannedPrompt | None:
        """Return a recent plan, or None; a new revision clears the cache."""
        if revision != self._revision:
            self._plans.clear()
            self._bases.clear()
            self._revision = revision
        at, planned = self._plans.get(question, (0.0, None))
        if planned is None or not 0 <= self._clock() - at < CACHE_SECONDS:
            self._plans.pop(question, None)
            return None
        self._plans.move_to_end(question)
        return planned

    def store_plan(self, question: PlanCacheKey, planned: PlannedPrompt) -> None:
        """Store a plan under the revision of the last `find_plan`."""
        base = self._share_base(planned.base)
        self._plans[question] = (self._clock(), replace(_abridge_plan(planned), base=base))
        self._plans.move_to_end(question)
        if len(self._plans) > self.most:
            self._plans.popitem(last=False)

    def check_integrity(self) -> None:
        """Check the limits on the cache and its entries."""
        assert len(self._plans) <= self.most
        for _, planned in self._plans.values():
            assert len(planned.result.candidates) <= KEPT_CANDIDATES
            assert not planned.result.features.words

    def _share_base(self, base: StoredBase) -> StoredBase:
        """Return the shared record equal to this base."""
        known = self._bases.get(base.name)
        if known is None or known != base:
            known = self._bases[base.name] = base
        return known


def _abridge_plan(planned: PlannedPrompt) -> PlannedPrompt:
    """Return a plan with only its first candidates and without the words of its prompt."""
    result = planned.result
    features = replace(result.features, words=())
    abridged = replace(result, candidates=result.candidates[:KEPT_CANDIDATES], features=features)
    return replace(planned, result=abridged)


def fold_prompt(prompt: str) -> str:
    """Return a prompt in one case, with every run of white space in its shortest form."""
    lines = _LINE_END.sub("\n", _BLANK_LINES.sub("\n\n", prompt.strip()))
    return _SPACES.sub(" ", lines).casefold()


def adapt_cached_plan(
    planned: PlannedPrompt, request: RouteRequest, *, took_ms: float
) -> PlannedPrompt:
    """Return a cached plan with the seed, prompt length and timing of this request."""
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


MAX_ELIGIBLE_SETS = 16
"""How many `EligibleExperts` are kept: any request may exclude other experts."""

_Key = tuple[object, ...]


class PlanningSession:
    """Plans prompts one after the other."""

    def __init__(self, planner: Planner, *, clock: Callable[[], float] = time.time) -> None:
        """Remember the planner; nothing is read yet."""
        self.planner = planner
        flagged = planner.index.folder / FLAGGED_FILE
        self._trust = str(planner.trust.path)
        self._yanked = str(planner.home.yanked)
        self._pins = PinFiles(planner.home, planner.folder)
        self._watched_paths = (str(planner.bases.folder), str(flagged))
        self._cached_inventory: tuple[_Key, Inventory] | None = None
        self._eligible: dict[_Key, EligibleExperts] = {}
        self._revision: _Key = ()
        self._cache = PlanCache(clock=clock)

    @property
    def inventory(self) -> Inventory:
        """The installed experts, read again if something changed."""
        mark, kept = self._inventory_key(), self._cached_inventory
        if kept is None or kept[0] != mark:
            self._eligible.clear()
            kept = self._cached_inventory = (mark, self.planner.read_inventory())
        return kept[1]

    def plan(
        self,
        request: RouteRequest,
        *,
        base: str | None = None,
        files: Sequence[InstalledExpert] = (),
    ) -> PlannedPrompt:
        """Plan one prompt as `Planner.plan` does; raises as it does."""
        roster = None if files else self._find_eligible  # not worth caching with files
        inventory = self.inventory
        return self.planner.plan_with_inventory(
            inventory, request, base=base, files=files, eligibility=roster
        )

    def plan_cached(
        self,
        request: RouteRequest,
        *,
        base: str | None = None,
        files: Sequence[InstalledExpert] = (),
    ) -> PlannedPrompt:
        """Plan one prompt, or return the cached plan of the same prompt.

        A cached plan has only its first candidates and gets a seed of its own. Plans with ``files``
        are not cached. Raises as `plan` does.
        """
        start = time.perf_counter()
        question, before = PlanCacheKey.from_request(request, base), self._change_key()
        known = (
            None if files else self._cache.find_plan(question, revision=self._revision_key(before))
        )
        if known is not None:
            return adapt_cached_plan(known, request, took_ms=(time.perf_counter() - start) * 1000)
        planned = self.plan(request, base=base, files=files)
        if not files and self._change_key() == before:
            now = self._revision_key(before)  # planning may have added vectors
            self._cache.find_plan(question, revision=now)
            self._cache.store_plan(question, planned)
        return planned

    def check_integrity(self) -> None:
        """Check the caches: few eligible sets, naming only experts that were read."""
        self._cache.check_integrity()
        assert len(self._eligible) <= MAX_ELIGIBLE_SETS
        experts = self._cached_inventory[1].experts if self._cached_inventory else ()
        known = {expert.digest for expert in experts}
        for roster in self._eligible.values():
            assert {expert.digest for expert in roster.experts} <= known

    def _find_eligible(
        self, request: RouteRequest, base: StoredBase, experts: Sequence[InstalledExpert]
    ) -> EligibleExperts:
        changes = self._change_key()  # taken before reading, so that later changes are noticed
        if self._revision_key(changes) != self._revision:
            self._eligible.clear()
        key = (base.name, base.identity, request.exclude, request.allow_base_mismatch)
        if key not in self._eligible:
            while len(self._eligible) >= MAX_ELIGIBLE_SETS:
                del self._eligible[next(iter(self._eligible))]
            self._eligible[key] = self.planner.find_eligible(request, base, experts)
        self._revision = self._revision_key(changes)  # `find_eligible` may have added vectors
        return self._eligible[key]

    def _revision_key(self, changes: _Key) -> _Key:
        """Return a key that changes with anything that a plan depends on."""
        return self.planner.index.revision, *changes

    def _change_key(self) -> _Key:
        """Return that key without the vectors, which planning itself may add."""
        watched = map(stat_fingerprint, self._watched_paths)
        return *self._inventory_key(), self.planner.catalogue.read_revision(), *watched

    def _inventory_key(self) -> _Key:
        stamps = (
            stat_fingerprint(self._trust),
            stat_fingerprint(self._yanked),
            self._pins.read_fingerprints(),
        )
        return self.planner.store.revision(), *stamps


KEPT_REASON = "kept from the previous turn"
MAX_SHORT_WORDS = 3
"""A prompt of at most this many words is a follow-up."""
MAX_REFERRING_WORDS = 25
"""A longer prompt is taken to state its subject, even if it refers back."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_DENSE_SCRIPT = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Letters of scripts that put no space between words."""
_SEPARATOR = re.compile(r"[,;\n]")
_PRONOUN = (
    r"(?:it|that|this|them|these|those)(?=\s*(?:$|[.!?,;)])"
    r"|\s+(?:again|as|in|into|to|with|for|more|less|one|once|instead|please|shorter|longer)\b)"
)
_BACK_REFERENCE = re.compile(
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
    """Tell whether a prompt depends on the previous turn: short, only data, or referring to it."""
    count = _count_words(prompt)
    if count <= MAX_SHORT_WORDS:
        return True
    pieces = _SEPARATOR.split(prompt)
    if len(pieces) > 1 and all(_count_words(piece) <= 2 for piece in pieces):
        return True
    return count <= MAX_REFERRING_WORDS and _BACK_REFERENCE.search(prompt) is not None


def _count_words(text: str) -> int:
    """Count words other than numbers; two letters of a dense script count as one word."""
    dense = len(_DENSE_SCRIPT.findall(text))
    return len(_WORD.findall(_DENSE_SCRIPT.sub(" ", text))) + (dense + 1) // 2


def plan_follow_up(
    session: PlanningSession,
    request: RouteRequest,
    previous: Plan,
    *,
    base: str | None = None,
    files: Sequence[InstalledExpert] = (),
) -> PlannedPrompt:
    """Plan a prompt that follows one answered by the plan ``previous``.

    Raises as `PlanningSession.plan_cached`, and NotFoundError when an expert of that plan is gone.
    """
    planned = session.plan_cached(request, base=base, files=files)
    if planned.experts or request.base_alone or not previous.experts:
        return planned
    if not is_follow_up(request.prompt):
        return planned
    _require_installed(session.planner.store, previous)
    force = tuple(ForcedExpert(expert.content_digest, expert.weight) for expert in previous.experts)
    kept = session.plan_cached(
        replace(request, force=force), base=base or previous.base, files=files
    )
    experts = tuple(replace(expert, reason=KEPT_REASON) for expert in kept.result.plan.experts)
    result = replace(
        kept.result,
        plan=replace(kept.result.plan, experts=experts),
        candidates=tuple(
            candidate.mark_accepted(KEPT_REASON) for candidate in kept.result.candidates
        ),
    )
    return replace(kept, result=result)


def _require_installed(store: Store, plan: Plan) -> None:
    """Require the experts of a plan, by digest; the error names the missing one."""
    for expert in plan.experts:
        try:
            store.find(expert.content_digest)
        except NotFoundError as error:
            raise NotFoundError(
                f"{expert.ref}, which answered the previous turn, is no longer installed",
                hint="start a new conversation, or name the experts that should answer",
            ) from error
