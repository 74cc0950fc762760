"""Publishing verified packages to the store, all or none of them, and the checks on them.

Requirements and conflicts are checked between candidates, new and installed ones.
`check_base_fit` compares a package with the known bases. `find_own_packages` finds the user's own
packages, which the router does not guard against: those that one of the user's own keys signed,
wherever they were installed from, and unsigned files of ``local/``, which the router uses only when
they are named. Packages of ``hf/``, which were converted from a hub, are signed here and written by
others: they are no own packages.

Each package is published after those it requires. When one cannot be, those before it are withdrawn
and the versions they replaced are restored: blobs are freed only after the last one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from expertctl.digest import Digest
from expertctl.errors import BaseMismatchError, ConflictError, ExpertError, MissingDependencyError
from expertctl.install.candidate import InstallCandidate, candidate_from_expert
from expertctl.package.compatibility import check_expert_base, check_tensors
from expertctl.package.read import PackageContents, VerifiedPackage
from expertctl.reference import Reference
from expertctl.routing.base_choice import collect_hidden_sizes
from expertctl.schema.manifest import Manifest
from expertctl.store.base_record import StoredBase
from expertctl.store.refs import LOCAL, MISMATCH, StoredExpert
from expertctl.store.transaction import AddOutcome, AddResult, PackageStaging, StoreTransaction
from expertctl.trust.keys import KeyRing
from expertctl.trust.trust_store import HUB_NAMESPACE, OWN_NAMESPACE


def check_requirements(
    new: Sequence[InstallCandidate], installed: Iterable[InstallCandidate]
) -> None:
    """Require that everything the new experts require is installed or among them.

    Raises:
        MissingDependencyError: naming everything that is missing.
    """
    there = [*new, *installed]
    missing = [
        (candidate.ref, wanted)
        for candidate in new
        for wanted in candidate.requires
        if not any(other.satisfies(wanted) for other in there)
    ]
    if missing:
        lines = "; ".join(f"{ref} requires {wanted}" for ref, wanted in missing)
        names = " ".join(dict.fromkeys(str(wanted) for _, wanted in missing))
        hint = f"get {names} and give its file to the same `expertctl install`"
        raise MissingDependencyError(f"{lines}, which is not installed", hint=hint)


def check_conflicts(new: Sequence[InstallCandidate], installed: Iterable[InstallCandidate]) -> None:
    """Require that no expert refuses another, in either direction.

    Raises:
        ConflictError: naming every pair.
    """
    refs = {candidate.ref for candidate in new}
    others = [candidate for candidate in installed if candidate.ref not in refs]
    pairs = [(a, b) for a, b in permutations([*new, *others], 2) if a.ref in refs or b.ref in refs]
    found = [
        f"{a.ref} conflicts with {b.ref}" for a, b in pairs if any(map(b.satisfies, a.conflicts))
    ]
    if found:
        hint = "`expertctl remove` the one that you need less, or install the other alone"
        raise ConflictError("; ".join(found), hint=hint)


def sort_by_requirements(new: Sequence[InstallCandidate]) -> list[InstallCandidate]:
    """Return the new experts in an order in which each follows what it requires, cycles aside."""
    ordered: list[InstallCandidate] = []
    seen: set[str] = set()

    def visit(candidate: InstallCandidate) -> None:
        if candidate.ref in seen:
            return
        seen.add(candidate.ref)
        for wanted in candidate.requires:
            for other in filter(lambda c: c.satisfies(wanted), new):
                visit(other)
        ordered.append(candidate)

    for candidate in new:
        visit(candidate)
    return ordered


def expand_requirements(
    wanted: Sequence[StoredExpert], installed: Sequence[StoredExpert]
) -> list[StoredExpert]:
    """Return experts and all that they require, of each the newest version that fits.

    Raises:
        MissingDependencyError: when something that one requires is not installed.
    """
    chosen = list(dict.fromkeys(wanted))
    for expert in chosen:  # grows during the iteration
        for needed in candidate_from_expert(expert).requires:
            if not any(candidate_from_expert(other).satisfies(needed) for other in chosen):
                chosen.append(_find_newest(needed, installed, of=expert))
    return chosen


def _find_newest(
    needed: Reference, installed: Sequence[StoredExpert], *, of: StoredExpert
) -> StoredExpert:
    found = [expert for expert in installed if candidate_from_expert(expert).satisfies(needed)]
    if not found:
        hint = f"install it first, or `expertctl remove {of.ref}`"
        raise MissingDependencyError(
            f"{of.ref} requires {needed}, which is not installed", hint=hint
        )
    return max(found, key=lambda expert: expert.version)


def find_dependants(expert: StoredExpert, installed: Iterable[StoredExpert]) -> list[str]:
    """Return the refs of the experts that require this one and could use no other."""
    rest = [candidate_from_expert(other) for other in installed if other != expert]
    own = candidate_from_expert(expert)
    return [
        other.ref
        for other in rest
        if any(own.satisfies(w) and not any(o.satisfies(w) for o in rest) for w in other.requires)
    ]


def find_missing_requirements(installed: Iterable[StoredExpert]) -> Mapping[str, list[str]]:
    """Return, for each ref, its requirements that are not installed."""
    experts = list(map(candidate_from_expert, installed))
    missing = {
        c.ref: [str(w) for w in c.requires if not any(o.satisfies(w) for o in experts)]
        for c in experts
    }
    return {ref: wanted for ref, wanted in missing.items() if wanted}


def check_base_fit(
    contents: PackageContents, bases: Sequence[StoredBase], *, allow_mismatch: bool = False
) -> tuple[list[str], list[str]]:
    """Check a package against the base it was made for, if that is known.

    Returns the warnings stored with the expert, and those shown only now.

    Raises:
        BaseMismatchError: when it was made for another base of that name, or when its tensors do
            not fit the base it was made for.
    """
    manifest = contents.manifest
    for base in bases:
        try:
            warnings = check_expert_base(manifest, base.identity)
        except BaseMismatchError:
            continue
        _check_tensors(contents, base)
        return warnings, []
    namesake = next((base for base in bases if base.name == manifest.base.name), None)
    if namesake is None:
        return [], [_unknown_base_warning(contents)]
    problems = _find_tensor_problems(contents, namesake)
    warnings = check_expert_base(
        manifest,
        namesake.identity,
        allow_mismatch=allow_mismatch,
        shapes_agree=not problems,
        widths=collect_hidden_sizes(bases),
    )
    return warnings + [f"{manifest.ref}: {MISMATCH}: {problem}" for problem in problems], []


def _check_tensors(contents: PackageContents, base: StoredBase) -> None:
    problems = _find_tensor_problems(contents, base)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise BaseMismatchError(
            f"{contents.manifest.ref} does not fit the base {base.name}:{lines}",
            hint="its publisher must build it again against this base",
        )


def _find_tensor_problems(contents: PackageContents, base: StoredBase) -> list[str]:
    return [
        p for spec in contents.adapters for p in check_tensors(spec, base.shapes, base=base.name)
    ]


def _unknown_base_warning(contents: PackageContents) -> str:
    base = contents.manifest.base
    return (
        f"{contents.manifest.ref}: its base {base.name} is not added yet, so its tensors were not "
        f"checked against it; `expertctl base add DIR` with the base's directory"
    )


def find_own_packages(experts: Iterable[StoredExpert], ring: KeyRing) -> frozenset[Digest]:
    """Return the content digests of the user's own packages."""
    keys = _read_key_ids(ring)
    return frozenset(expert.content_digest for expert in experts if _is_own(expert, keys))


def _is_own(expert: StoredExpert, keys: frozenset[str]) -> bool:
    if expert.package.namespace == HUB_NAMESPACE:
        return False  # signed here, written by somebody else
    if expert.signer is not None:
        return expert.signer in keys
    unsigned_file = expert.signature is None and expert.registry == LOCAL
    return unsigned_file and expert.package.namespace == OWN_NAMESPACE


def _read_key_ids(ring: KeyRing) -> frozenset[str]:
    """Return the ids of the user's keys; unreadable ones are skipped."""
    found = set()
    for name in ring.list_names():
        try:
            found.add(ring.read_public(name).key_id)
        except ExpertError:
            continue
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """The result for one package."""

    expert: StoredExpert
    outcome: AddOutcome
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Publishable:
    """A verified package in its staging, with warnings for the user."""

    package: VerifiedPackage
    staging: PackageStaging
    registry: str
    authority: str | None = None
    """The registry that its namespace belongs to, where it comes from another one."""
    stored_warnings: tuple[str, ...] = ()
    install_warnings: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the package."""
        return self.package.contents.manifest


def publish_all(
    candidates: Sequence[Publishable], changes: StoreTransaction, accept_changed: Collection[str]
) -> list[InstalledPackage]:
    """Publish packages in their order; those in ``accept_changed`` may replace another content.

    Raises:
        StoreError: when one cannot be published; then the store is what it was before.
    """
    now = changes.scan()
    here = {expert.ref: expert for expert in now.experts}
    before = {*here, *(ref.name for ref in now.damaged)}
    superseding: list[AddResult] = []
    try:
        done = [
            _keep_from_authority(candidate, here.get(candidate.manifest.ref))
            or _publish_one(candidate, changes, accept_changed, superseding)
            for candidate in candidates
        ]
    except BaseException:
        _roll_back(candidates, changes, here, before)
        raise
    if superseded := [digest for added in superseding for digest in added.superseded]:
        changes.free_blobs(superseded)
    return done


def _roll_back(
    candidates: Sequence[Publishable],
    changes: StoreTransaction,
    here: Mapping[str, StoredExpert],
    before: Collection[str],
) -> None:
    """Restore the store: remove what is new, restore what was replaced."""
    there = {expert.ref: expert for expert in changes.scan().experts}
    for candidate in reversed(candidates):
        ref = candidate.manifest.ref
        now, old = there.get(ref), here.get(ref)
        if old is not None and now != old:
            changes.restore(old, candidate.staging)
        elif now is not None and ref not in before:
            changes.remove(now)
    layouts = [candidate.package.contents.layout for candidate in candidates]
    changes.free_blobs(file.digest for layout in layouts for file in layout.layers)


def _keep_from_authority(
    candidate: Publishable, there: StoredExpert | None
) -> InstalledPackage | None:
    """Return the installed expert where it has the same content from the namespace's own registry.

    Another registry does not replace it: revocations by the own one would no longer apply to it.
    """
    if there is None or candidate.authority is None or there.registry != candidate.authority:
        return None
    if there.content_digest != candidate.package.contents.content_digest:
        return None
    warning = (
        f"{there.ref} stays that of {there.registry}, to which {there.package.namespace}/* "
        f"belongs; {candidate.registry} has the same content"
    )
    return InstalledPackage(there, "already installed", (warning,))


def _publish_one(
    candidate: Publishable,
    changes: StoreTransaction,
    accept_changed: Collection[str],
    superseding: list[AddResult],
) -> InstalledPackage:
    added = changes.publish(
        candidate.package,
        candidate.staging,
        warnings=candidate.stored_warnings,
        registry=candidate.registry,
        replace=candidate.manifest.ref in accept_changed,
    )
    superseding.append(added)
    warnings = [*candidate.stored_warnings, *candidate.install_warnings]
    if added.expert.signer is None:
        warnings.append(f"{added.expert.ref} is not signed: nobody vouches for it")
    return InstalledPackage(added.expert, added.outcome, tuple(warnings))
