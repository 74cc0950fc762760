"""`Planner`: plans prompts with the experts and bases of one home.

The router works on values; the planner reads them: installed experts with their manifests, revoked
keys, usage statistics and the known bases. Nothing is loaded into the engine.

`drop_lowest_scoring` shrinks a plan that does not fit into memory: it drops the expert with the
lowest score (the later one of equals) with its dependents and with requirements that are no longer
needed. The others keep their order, and the plan is rebuilt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from expertctl.digest import Digest
from expertctl.errors import (
    BaseMismatchError,
    DigestError,
    ExpertError,
    NotFoundError,
    Notify,
    UsageError,
    ignore_notification,
)
from expertctl.reference import Reference
from expertctl.routing.base_choice import BaseSelector, collect_hidden_sizes, explain_mismatch
from expertctl.routing.candidate import EligibleExperts, InstalledExpert, find_eligible_experts
from expertctl.routing.decision import collect_warnings
from expertctl.routing.encoder import open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.plan import Plan, PlannedExpert, check_identity, compare_experts
from expertctl.routing.request import ForcedExpert, RouteRequest, complete_overrides
from expertctl.routing.router import RoutingResult, build_plan, route_prompt
from expertctl.routing.selection import SelectedExpert, find_requirements
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.package_reader import read_stored_expert
from expertctl.store.preference import FLAGS_FILE as FLAGGED_FILE
from expertctl.store.preference import VersionPreference, read_flags, read_preference
from expertctl.store.refs import DamagedRef, StoredExpert
from expertctl.store.store import Store
from expertctl.trust.bundle import read_bundle
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore

EligibilityFunction = Callable[
    [RouteRequest, StoredBase, Sequence[InstalledExpert]], EligibleExperts
]
"""Returns which of these experts may answer requests like this one on a base."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A routed prompt: the result, the base, and the experts in plan order."""

    result: RoutingResult
    base: StoredBase
    experts: tuple[InstalledExpert, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the home and the plan."""
        return self.result.warnings


@dataclass(frozen=True, slots=True)
class Inventory:
    """The installed experts that can be read, and the others with their errors."""

    experts: tuple[InstalledExpert, ...]
    unreadable: tuple[tuple[StoredExpert, ExpertError], ...]
    damaged: tuple[DamagedRef, ...]
    problems: tuple[str, ...] = ()
    """Lock files and lists that were ignored, and why."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What no plan can use, and why."""
        damaged = (ref.warning for ref in self.damaged)
        return (*damaged, *(_describe_broken(*pair) for pair in self.unreadable), *self.problems)


@dataclass(frozen=True, slots=True)
class Planner:
    """Everything in a home that a plan depends on."""

    store: Store
    bases: BaseStore
    trust: TrustStore
    catalogue: Catalogue
    index: RoutingIndex
    home: Home
    notify: Notify = ignore_notification
    """Called with messages for a user who waits."""
    preferred_base: str | None = None
    """The setting ``base``."""
    folder: Path | None = None
    """The folder of the project that pins installed versions; None: no project."""

    @property
    def base_selector(self) -> BaseSelector:
        """The rules for choosing a base."""
        return BaseSelector(self.bases, self.preferred_base)

    @classmethod
    def open(
        cls, settings: Settings, *, notify: Notify = ignore_notification, folder: Path | None = None
    ) -> Self:
        """Create the planner of a home; only the encoder's files are read.

        Raises:
            NotFoundError: when the requested encoder is not available.
        """
        home = settings.home
        return cls(
            store=Store(home.store),
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            catalogue=Catalogue(home.index),
            index=RoutingIndex(home.root, open_encoder(settings.encoder, home=home)),
            home=home,
            notify=notify,
            preferred_base=settings.base,
            folder=folder,
        )

    def plan(
        self,
        request: RouteRequest,
        *,
        base: str | None = None,
        files: Sequence[InstalledExpert] = (),
    ) -> PlannedPrompt:
        """Plan one prompt on the named base, or on the one that `BaseSelector` chooses.

        ``files`` are experts that are not installed but may be named by digest.

        Raises:
            UsageError: when the request itself is wrong.
            NotFoundError: when there is no base, or a forced expert is not installed.
            DigestError: when a forced expert was changed in the store.
            IncompatibleError: when forced experts do not fit the base or each other.
            RevokedError: when the key of a forced expert was revoked.
            BaseMismatchError: when the base changed since it was added.
        """
        return self.plan_with_inventory(self.read_inventory(), request, base=base, files=files)

    def plan_with_inventory(
        self,
        inventory: Inventory,
        request: RouteRequest,
        *,
        base: str | None = None,
        files: Sequence[InstalledExpert] = (),
        eligibility: EligibilityFunction | None = None,
    ) -> PlannedPrompt:
        """Plan a prompt with an inventory that was read before; raises as `plan`."""
        self._require_readable(request, inventory)
        known = {expert.digest: expert for expert in (*files, *inventory.experts)}
        experts, find = list(known.values()), eligibility or self.find_eligible
        bases = self.base_selector.select_bases(request, experts, base_name=base)
        routed = [
            (self._route_on_base(request, each, experts, find, is_base_named=bool(base)), each)
            for each in bases
        ]
        result, chosen = max(routed, key=lambda pair: _find_best_score(pair[0]))
        return PlannedPrompt(
            result=replace(result, warnings=(*inventory.warnings, *result.warnings)),
            base=chosen,
            experts=tuple(known[e.content_digest] for e in result.plan.experts),
        )

    def replay(
        self, saved: Plan, request: RouteRequest, *, base: str | None = None
    ) -> PlannedPrompt:
        """Plan one prompt with the experts of a saved plan, found by digest.

        Its seed and settings are the defaults of the request. An expert that was signed again is
        named in ``warnings``. Raises as `plan` does, and:

        Raises:
            UsageError: when the request forces experts or has ``base_alone``.
            DigestError: when the content of an expert has changed.
            IncompatibleError: when the numbers would differ from those of the saved plan.
        """
        if request.force or request.base_alone:
            raise UsageError(
                "a saved plan already determines which experts answer",
                hint="leave out --expert and --no-experts, or --plan",
            )
        inventory, wanted = self.read_inventory(), _apply_saved_plan(request, saved)
        self._require_readable(wanted, inventory)
        for expert in saved.experts:
            _require_installed_expert(expert, inventory)
        planned = self.plan_with_inventory(inventory, wanted, base=base or saved.base)
        plan = planned.result.plan
        check_identity(saved, plan.identity, base=planned.base, config=wanted.config)
        renewed = tuple(
            warning
            for before, now in zip(saved.experts, plan.experts, strict=True)
            for warning in compare_experts(before, now)
        )
        warnings = (*planned.result.warnings, *renewed)
        return replace(planned, result=replace(planned.result, warnings=warnings))

    def read_inventory(self) -> Inventory:
        """Read the manifests of all installed experts and verify their digests."""
        readable: list[InstalledExpert] = []
        broken: list[tuple[StoredExpert, ExpertError]] = []
        trusted = self.trust.read()
        now, preference = self.store.scan(), self.load_preference()
        for stored in now.experts:
            pin = preference.find_pin(stored)
            try:
                readable.append(
                    InstalledExpert(
                        stored,
                        self.store.read_manifest(stored),
                        revoked=self._is_revoked(stored, trusted),
                        home=trusted.find_conflicting_registry(
                            stored.package.namespace, stored.registry
                        ),
                        yanked=preference.find_yank_reason(stored),
                        pinned=pin.source if pin else None,
                    )
                )
            except ExpertError as error:
                broken.append((stored, error))
        return Inventory(tuple(readable), tuple(broken), now.damaged, preference.pins.problems)

    def load_preference(self) -> VersionPreference:
        """Read the rules that choose among installed versions of a package."""
        return read_preference(self.home, self.folder)

    def _is_revoked(self, stored: StoredExpert, trusted: TrustRecord) -> bool:
        """Tell whether the signing key was revoked, globally or by the registry it came from."""
        signer = stored.signer or self._read_unverified_signer(stored)
        if signer is None:
            return False
        namespace = stored.package.namespace
        return (
            trusted.find_revocation(signer, namespace=namespace, registry=stored.registry)
            is not None
        )

    def _read_unverified_signer(self, stored: StoredExpert) -> str | None:
        """Return the unverified key id in the signature of an expert installed by digest."""
        if stored.signature is None:
            return None
        try:
            return read_bundle(self.store.blob_path(stored.signature.digest).read_bytes()).key_id
        except (OSError, ExpertError):  # `doctor` reports it
            return None

    def _require_readable(self, request: RouteRequest, inventory: Inventory) -> None:
        """Raise the error of an unreadable expert that is forced; others are only left out."""
        errors = dict(inventory.unreadable)
        if not (errors and request.force):
            return
        store = replace(self.store, preference=self.load_preference())
        for forced in request.force:
            try:
                error = errors.get(store.find(forced.target))
            except NotFoundError:
                continue  # a file, or the router reports it
            if error is not None:
                raise error

    def _route_on_base(
        self,
        request: RouteRequest,
        base: StoredBase,
        experts: Sequence[InstalledExpert],
        eligibility: EligibilityFunction,
        *,
        is_base_named: bool,
    ) -> RoutingResult:
        rates = self.catalogue.read_success_rates()
        try:
            return route_prompt(
                request,
                eligibility(request, base, experts),
                base=base,
                index=self.index,
                success_rate=lambda digest, task: rates.find_rate(digest, task=task),
            )
        except ExpertError as error:
            self.bases.check(base)  # a base that changed since it was added explains any error
            if not isinstance(error, BaseMismatchError):
                raise
            raise explain_mismatch(
                error,
                request,
                experts,
                base,
                known=self.bases.list_bases(),
                is_named=is_base_named,
                adapters=lambda expert: read_stored_expert(self.store, expert.stored).adapters,
            ) from error

    def find_eligible(
        self, request: RouteRequest, base: StoredBase, experts: Sequence[InstalledExpert]
    ) -> EligibleExperts:
        """Return which experts may answer requests like this one on a base."""
        self._notify_encoding(experts)
        return find_eligible_experts(
            request,
            experts,
            base=base,
            index=self.index,
            flags=read_flags(self.index.folder / FLAGGED_FILE),
            gains=self.catalogue.find_sure_gains(base=base.name),
            widths=collect_hidden_sizes(self.bases.list_bases()),
        )

    def _notify_encoding(self, experts: Sequence[InstalledExpert]) -> None:
        """Notify the user of a delay if vectors are missing that were not made on installation."""
        manifests = {expert.digest: expert.manifest for expert in experts}
        if not self.index.count_missing(manifests):
            return
        self.index.refresh()  # another process may have made them
        lacking = self.index.count_missing(manifests)
        if lacking:
            whose = "1 expert" if lacking == 1 else f"{lacking} experts"
            name = self.index.encoder.name
            self.notify(f"computing the routing vectors of {whose} with {name}, once")


def _apply_saved_plan(request: RouteRequest, saved: Plan) -> RouteRequest:
    return replace(
        request,
        force=tuple(ForcedExpert(expert.content_digest, expert.weight) for expert in saved.experts),
        base_alone=not saved.experts,
        seed=saved.seed if request.seed is None else request.seed,
        sampling=complete_overrides(request.sampling, saved.params),
    )


def _require_installed_expert(expert: PlannedExpert, inventory: Inventory) -> None:
    if any(e.digest == expert.content_digest for e in inventory.experts):
        return
    others = [e.digest for e in inventory.experts if e.ref == expert.ref]
    if others:
        raise DigestError(
            f"{expert.ref} is installed with the content {str(others[0])[:19]}…, the plan was "
            f"made with {str(expert.content_digest)[:19]}…",
            hint="install the package that the plan was made with, or route the prompt again",
        )
    raise NotFoundError(
        f"{expert.ref} of the saved plan is not installed ({expert.content_digest})",
        hint=f"install it: `expertctl install {expert.ref}`, or its file",
    )


def _find_best_score(result: RoutingResult) -> float:
    return max((expert.score for expert in result.plan.experts), default=float("-inf"))


def _describe_broken(stored: StoredExpert, error: ExpertError) -> str:
    return f"{stored.ref} was left out: {error.message}; see `expertctl doctor`"


@dataclass(frozen=True, slots=True)
class DroppedExpert:
    """An expert dropped from a plan, with the reason."""

    ref: str
    content_digest: Digest
    reason: str

    @property
    def warning(self) -> str:
        """The message for the user."""
        return f"{self.ref} was left out: {self.reason}"

    def to_json(self) -> JsonObject:
        """Return its entry of ``dropped`` in ``run --json``."""
        return {"ref": self.ref, "content_digest": str(self.content_digest), "reason": self.reason}


def drop_lowest_scoring(
    planned: PlannedPrompt, request: RouteRequest, *, reason: str
) -> tuple[PlannedPrompt, tuple[DroppedExpert, ...]]:
    """Return a plan without its lowest-scoring expert and its dependents, and what was dropped.

    ``reason`` says what did not fit, in bytes. The given plan must have an expert.
    """
    choices = planned.result.selected
    least = _find_lowest_scoring(planned)
    kept = _remove_expert(choices, least)
    gone = [choice.expert for choice in choices if choice not in kept]
    dropped = tuple(
        DroppedExpert(e.ref, e.digest, _explain_drop(e, least, gone, reason)) for e in gone
    )
    return _rebuild_plan(planned, request, kept), dropped


def _find_lowest_scoring(planned: PlannedPrompt) -> InstalledExpert:
    scores = [expert.score for expert in planned.result.plan.experts]
    place = min(range(len(scores)), key=lambda n: (scores[n], -n))
    return planned.experts[place]


def _remove_expert(
    choices: Sequence[SelectedExpert], removed: InstalledExpert
) -> tuple[SelectedExpert, ...]:
    """Remove an expert, then experts that miss a requirement, then unneeded requirements."""
    kept = tuple(choice for choice in choices if choice.expert.digest != removed.digest)
    while (fewer := tuple(c for c in kept if _has_all_requirements(c.expert, kept))) != kept:
        kept = fewer
    needed: dict[str, InstalledExpert] = {}
    for choice in kept:
        if not choice.is_dependency:
            _collect_needed(choice.expert, [other.expert for other in kept], needed)
    return tuple(choice for choice in kept if choice.expert.ref in needed)


def _has_all_requirements(expert: InstalledExpert, remaining: Sequence[SelectedExpert]) -> bool:
    wanted = [Reference.parse(text) for text in expert.manifest.composition.requires]
    return all(any(choice.expert.matches(one) for choice in remaining) for one in wanted)


def _collect_needed(
    expert: InstalledExpert,
    remaining: Sequence[InstalledExpert],
    needed: dict[str, InstalledExpert],
) -> None:
    if expert.ref not in needed:
        needed[expert.ref] = expert
        for other in find_requirements(expert, remaining):
            _collect_needed(other, remaining, needed)


def _explain_drop(
    expert: InstalledExpert,
    lowest: InstalledExpert,
    removed: Sequence[InstalledExpert],
    reason: str,
) -> str:
    if expert == lowest:
        return reason
    missed = find_requirements(expert, removed)
    if missed:
        return f"it requires {missed[0].ref}, which was left out: {reason}"
    return f"only experts left out with {lowest.ref} required it: {reason}"


def _rebuild_plan(
    planned: PlannedPrompt, request: RouteRequest, remaining: Sequence[SelectedExpert]
) -> PlannedPrompt:
    result = planned.result
    scores = {expert.content_digest: expert.score for expert in result.plan.experts}
    plan = build_plan(request, remaining, scores, result.features, planned.base)
    obsolete = set(collect_warnings(result.selected, planned.base)) - set(
        collect_warnings(remaining, planned.base)
    )
    warnings = tuple(warning for warning in result.warnings if warning not in obsolete)
    alone = (
        () if remaining else ("the base answers alone: no expert fits into the remaining memory",)
    )
    return PlannedPrompt(
        result=replace(
            result,
            plan=replace(plan, seed=result.plan.seed),
            selected=tuple(remaining),
            notes=(*result.notes, *alone),
            warnings=warnings,
        ),
        base=planned.base,
        experts=tuple(choice.expert for choice in remaining),
    )
