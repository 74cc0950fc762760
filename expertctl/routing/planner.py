"""`Planner`: what one home offers to a prompt, and the base on which it is answered.

The router works on values; here they are read: installed experts with their manifests, revoked
keys, usage, and the known bases. Nothing is loaded into the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from expertctl.errors import BaseMismatchError, DigestError, ExpertError, NotFoundError, UsageError
from expertctl.package.adapter import AdapterSpec
from expertctl.routing.base_choice import BaseRule, explain_mismatch, widths_of
from expertctl.routing.candidate import Installed
from expertctl.routing.encoder import open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.numerics import check_identity, compare_experts
from expertctl.routing.plan import Plan, PlannedExpert
from expertctl.routing.presets import completed
from expertctl.routing.request import Forced, RouteRequest
from expertctl.routing.roster import Roster
from expertctl.routing.router import RoutingResult, roster_of, route
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.contents import read_stored
from expertctl.store.flags import FILE as FLAGGED_FILE
from expertctl.store.flags import read_flagged
from expertctl.store.paths import DamagedRef
from expertctl.store.preference import Preference, read_preference
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store
from expertctl.telling import Tell, tell_nobody
from expertctl.trust.bundle import read_bundle
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

RosterMaker = Callable[[RouteRequest, StoredBase, Sequence[Installed]], Roster]
"""Works out which of some experts may answer such requests on a base."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A routed prompt: the plan and why, its base, its experts in plan order."""

    result: RoutingResult
    base: StoredBase
    experts: tuple[Installed, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the home and of the plan."""
        return self.result.warnings


@dataclass(frozen=True, slots=True)
class Inventory:
    """The installed experts that can be read, and the others with their errors."""

    experts: tuple[Installed, ...]
    broken: tuple[tuple[StoredExpert, ExpertError], ...]
    damaged: tuple[DamagedRef, ...]
    problems: tuple[str, ...] = ()
    """Why a lock file or a list was ignored."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is left out of every plan, and why."""
        damaged = (ref.warning for ref in self.damaged)
        return (*damaged, *(_broken(*pair) for pair in self.broken), *self.problems)


@dataclass(frozen=True, slots=True)
class Planner:
    """Everything of a home that a plan depends on."""

    store: Store
    bases: BaseStore
    trust: TrustStore
    catalogue: Catalogue
    index: RoutingIndex
    home: Home
    tell: Tell = tell_nobody
    """Called with what the user should know while waiting."""
    preferred_base: str | None = None
    """The setting ``base``."""
    folder: Path | None = None
    """The folder whose project says which installed versions are meant; None: none does."""

    @property
    def rule(self) -> BaseRule:
        """What decides which base answers."""
        return BaseRule(self.bases, self.preferred_base)

    @classmethod
    def open(
        cls, settings: Settings, *, tell: Tell = tell_nobody, folder: Path | None = None
    ) -> Self:
        """Name the parts of a home; only the encoder's files are read now.

        Raises:
            NotFoundError: when the encoder that was asked for is not there.
        """
        home = settings.home
        return cls(
            store=Store(home.store),
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            catalogue=Catalogue(home.index),
            index=RoutingIndex(home.root, open_encoder(settings.encoder, home=home)),
            home=home,
            tell=tell,
            preferred_base=settings.base,
            folder=folder,
        )

    def plan(
        self, request: RouteRequest, *, base: str | None = None, files: Sequence[Installed] = ()
    ) -> Planned:
        """Plan one prompt on the base that is named, else on the one that `BaseRule` says.

        ``files`` are experts that are not installed but may be named by their digest.

        Raises:
            UsageError: when the request itself is wrong.
            NotFoundError: when there is no base, or a forced expert is not installed.
            DigestError: when a forced expert was changed in the store.
            IncompatibleError: when forced experts do not fit the base or each other.
            RevokedError: when the key of a forced expert was revoked.
            BaseMismatchError: when the base cannot be read as it is not what was added.
        """
        return self._planned(request, self.inventory(), base=base, files=files)

    def plan_from(
        self,
        inventory: Inventory,
        request: RouteRequest,
        *,
        base: str | None = None,
        files: Sequence[Installed] = (),
        roster: RosterMaker | None = None,
    ) -> Planned:
        """Plan one of many prompts on one reading of the installed experts; raises as `plan`."""
        return self._planned(request, inventory, base=base, files=files, roster=roster)

    def _planned(
        self,
        request: RouteRequest,
        inventory: Inventory,
        *,
        base: str | None,
        files: Sequence[Installed] = (),
        roster: RosterMaker | None = None,
    ) -> Planned:
        self._refuse_broken(request, inventory)
        known = {expert.digest: expert for expert in (*files, *inventory.experts)}
        experts = list(known.values())
        routed = [
            (
                self._routed(request, candidate, experts, roster or self.roster, named=bool(base)),
                candidate,
            )
            for candidate in self.rule.answering(request, experts, named=base)
        ]
        result, chosen = max(routed, key=lambda pair: _best_score(pair[0]))
        by_digest = {expert.digest: expert for expert in experts}
        return Planned(
            result=replace(result, warnings=(*inventory.warnings, *result.warnings)),
            base=chosen,
            experts=tuple(by_digest[e.content_digest] for e in result.plan.experts),
        )

    def replay(self, saved: Plan, request: RouteRequest, *, base: str | None = None) -> Planned:
        """Plan one prompt with the experts of a saved plan, found by their digests.

        Its seed and settings count where the request says nothing. An expert that was signed anew
        is named in ``warnings``. Raises as `plan` does, and:

        Raises:
            UsageError: when the request names experts, or forbids them.
            DigestError: when an expert has another content now.
            IncompatibleError: when the numbers would not be those of the saved plan.
        """
        if request.force or request.base_alone:
            raise UsageError(
                "a saved plan says already which experts answer",
                hint="leave out --expert and --no-experts, or --plan",
            )
        inventory, wanted = self.inventory(), _as_saved(request, saved)
        self._refuse_broken(wanted, inventory)
        for expert in saved.experts:
            _check_installed(expert, inventory)
        planned = self._planned(wanted, inventory, base=base or saved.base)
        plan = planned.result.plan
        check_identity(saved, plan.identity, base=planned.base, request=wanted)
        renewed = tuple(
            warning
            for before, now in zip(saved.experts, plan.experts, strict=True)
            for warning in compare_experts(before, now)
        )
        warnings = (*planned.result.warnings, *renewed)
        return replace(planned, result=replace(planned.result, warnings=warnings))

    def inventory(self) -> Inventory:
        """Read the manifests of all installed experts, their bytes hashed."""
        readable: list[Installed] = []
        broken: list[tuple[StoredExpert, ExpertError]] = []
        trusted = self.trust.read()
        now, preference = self.store.scan(), self.preference()
        for stored in now.experts:
            pin = preference.pin(stored)
            try:
                readable.append(
                    Installed(
                        stored,
                        self.store.manifest(stored),
                        revoked=self._is_revoked(stored, trusted),
                        home=trusted.other_home(stored.package.namespace, stored.registry),
                        yanked=preference.yank_reason(stored),
                        pinned=pin.source if pin else None,
                    )
                )
            except ExpertError as error:
                broken.append((stored, error))
        return Inventory(tuple(readable), tuple(broken), now.damaged, preference.pins.problems)

    def preference(self) -> Preference:
        """Read what decides between several installed versions of a package."""
        return read_preference(self.home, self.folder)

    def _is_revoked(self, stored: StoredExpert, trusted: TrustRecord) -> bool:
        """Tell whether the key was revoked, everywhere or by the registry that this came from."""
        signer = stored.signer or self._unvouched_signer(stored)
        if signer is None:
            return False
        namespace = stored.package.namespace
        return trusted.revocation(signer, namespace=namespace, registry=stored.registry) is not None

    def _unvouched_signer(self, stored: StoredExpert) -> str | None:
        """Return who signed an expert that the user took by its exact bytes; the key may be bad."""
        if stored.signature is None:
            return None
        try:
            return read_bundle(self.store.blob_path(stored.signature.digest).read_bytes()).key_id
        except (OSError, ExpertError):  # `doctor` reports it
            return None

    def _refuse_broken(self, request: RouteRequest, inventory: Inventory) -> None:
        """Raise the error of a broken expert that the user names; others are only left out."""
        errors = dict(inventory.broken)
        if not (errors and request.force):
            return
        store = replace(self.store, preference=self.preference())
        for forced in request.force:
            try:
                error = errors.get(store.find(forced.target))
            except NotFoundError:
                continue  # a file, or the router reports it
            if error is not None:
                raise error

    def _routed(
        self,
        request: RouteRequest,
        base: StoredBase,
        experts: Sequence[Installed],
        make_roster: RosterMaker,
        *,
        named: bool,
    ) -> RoutingResult:
        rates = self.catalogue.success_rates()
        try:
            return route(
                request,
                make_roster(request, base, experts),
                base=base,
                index=self.index,
                success_rate=lambda digest, task: rates.of(digest, task=task),
            )
        except ExpertError as error:
            self.bases.check(base)  # a base that is not what was added explains the rest
            if not isinstance(error, BaseMismatchError):
                raise
            known = self.bases.bases()
            adapters = self._adapters
            raise explain_mismatch(
                error, request, experts, base, known=known, named=named, adapters=adapters
            ) from error

    def _adapters(self, expert: Installed) -> Sequence[AdapterSpec]:
        """Read what the adapters of an installed expert change, from its files."""
        return read_stored(self.store, expert.stored).adapters

    def roster(
        self, request: RouteRequest, base: StoredBase, experts: Sequence[Installed]
    ) -> Roster:
        """Return which experts may answer such requests on a base."""
        self._tell_of_encoding(experts)
        return roster_of(
            request,
            experts,
            base=base,
            index=self.index,
            flags=read_flagged(self.index.folder / FLAGGED_FILE),
            gains=self.catalogue.gains(base=base.name),
            widths=widths_of(self.bases.bases()),
        )

    def _tell_of_encoding(self, experts: Sequence[Installed]) -> None:
        """Tell the user why it takes a while, where installing did not make all vectors."""
        manifests = {expert.digest: expert.manifest for expert in experts}
        if not self.index.lacking(manifests):
            return
        self.index.refresh()  # another process may have made them
        lacking = self.index.lacking(manifests)
        if lacking:
            whose = "1 expert" if lacking == 1 else f"{lacking} experts"
            name = self.index.encoder.name
            self.tell(f"making the routing vectors of {whose} with {name}, to be kept")


def _as_saved(request: RouteRequest, saved: Plan) -> RouteRequest:
    return replace(
        request,
        force=tuple(Forced(expert.content_digest, expert.weight) for expert in saved.experts),
        base_alone=not saved.experts,
        seed=saved.seed if request.seed is None else request.seed,
        wishes=completed(request.wishes, saved.params),
    )


def _check_installed(expert: PlannedExpert, inventory: Inventory) -> None:
    """Demand that the content of a planned expert is there."""
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


def _best_score(result: RoutingResult) -> float:
    return max((expert.score for expert in result.plan.experts), default=float("-inf"))


def _broken(stored: StoredExpert, error: ExpertError) -> str:
    return f"{stored.ref} was left out: {error.message}; see `expertctl doctor`"
