"""Publishing verified packages to the store, all or none of them.

Each is published after what it requires. When one cannot be, those before it are withdrawn, and
what they replaced is restored: blobs are freed only after the last one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from expertctl.package.verify import VerifiedPackage
from expertctl.schema.manifest import Manifest
from expertctl.store.ref import StoredExpert
from expertctl.store.staging import Staging
from expertctl.store.transaction import Added, Outcome, Transaction


@dataclass(frozen=True, slots=True)
class Installed:
    """What happened to one package."""

    expert: StoredExpert
    outcome: Outcome
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Publishable:
    """A verified package in its staging, with what the user is to be told of it."""

    package: VerifiedPackage
    staging: Staging
    registry: str
    home: str | None = None
    """The registry that its namespace belongs to, where it comes from another one."""
    lasting: tuple[str, ...] = ()
    momentary: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """What the package says of itself."""
        return self.package.contents.manifest


def publish_all(
    candidates: Sequence[Publishable], changes: Transaction, accept_changed: Collection[str]
) -> list[Installed]:
    """Publish packages in their order; those in ``accept_changed`` may replace another content.

    Raises:
        StoreError: when one cannot be published; then the store is what it was before.
    """
    now = changes.scan()
    here = {expert.ref: expert for expert in now.experts}
    before = {*here, *(ref.name for ref in now.damaged)}
    superseding: list[Added] = []
    try:
        done = [
            _kept_from_home(candidate, here.get(candidate.manifest.ref))
            or _publish(candidate, changes, accept_changed, superseding)
            for candidate in candidates
        ]
    except BaseException:
        _undo(candidates, changes, here, before)
        raise
    if superseded := [digest for added in superseding for digest in added.superseded]:
        changes.free(superseded)
    return done


def _undo(
    candidates: Sequence[Publishable],
    changes: Transaction,
    here: Mapping[str, StoredExpert],
    before: Collection[str],
) -> None:
    """Bring the store back to what it was before: remove what is new, restore what was replaced."""
    there = {expert.ref: expert for expert in changes.scan().experts}
    for candidate in reversed(candidates):
        ref = candidate.manifest.ref
        now, old = there.get(ref), here.get(ref)
        if old is not None and now != old:
            changes.restore(old, candidate.staging)
        elif now is not None and ref not in before:
            changes.remove(now)
    layouts = [candidate.package.contents.layout for candidate in candidates]
    changes.free(file.digest for layout in layouts for file in layout.layers)


def _kept_from_home(candidate: Publishable, there: StoredExpert | None) -> Installed | None:
    """Return the same content from the namespace's own registry, which another does not replace.

    Otherwise what that registry revokes would not count for it any more.
    """
    if there is None or candidate.home is None or there.registry != candidate.home:
        return None
    if there.content_digest != candidate.package.contents.content_digest:
        return None
    warning = (
        f"{there.ref} stays that of {there.registry}, to which {there.package.namespace}/* "
        f"belongs; {candidate.registry} has the same content"
    )
    return Installed(there, "already installed", (warning,))


def _publish(
    candidate: Publishable,
    changes: Transaction,
    accept_changed: Collection[str],
    superseding: list[Added],
) -> Installed:
    added = changes.put(
        candidate.package,
        candidate.staging,
        warnings=candidate.lasting,
        registry=candidate.registry,
        replace=candidate.manifest.ref in accept_changed,
    )
    superseding.append(added)
    warnings = [*candidate.lasting, *candidate.momentary]
    if added.expert.signer is None:
        warnings.append(f"{added.expert.ref} is not signed: nobody vouches for it")
    return Installed(added.expert, added.outcome, tuple(warnings))
