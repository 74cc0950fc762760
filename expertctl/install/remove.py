"""Removing experts and bases, unless others need them."""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.errors import ConflictError, ExpertError, NotFoundError
from expertctl.install.requirements import dependants
from expertctl.routing.index import RoutingIndex
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.paths import DamagedRef
from expertctl.store.ref import RequiredBase, StoredExpert
from expertctl.store.store import Store, parse_wanted
from expertctl.store.transaction import Freed


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, and what lacks a requirement now."""

    ref: str
    freed: Freed
    warnings: tuple[str, ...] = ()


def remove_expert(
    wanted: str,
    *,
    store: Store,
    catalogue: Catalogue | None = None,
    index: RoutingIndex | None = None,
    force: bool = False,
) -> Removed:
    """Remove the newest version that fits; given its exact name, also one with a damaged ref.

    Raises:
        NotFoundError: when nothing fits.
        ConflictError: when others require it and ``force`` is not given.
    """
    damaged = next((ref for ref in store.scan().damaged if ref.name == wanted), None)
    if damaged is not None:
        return _discard(damaged, store)
    expert = store.find(parse_wanted(wanted))
    with store.transaction() as changes:
        experts = changes.scan().experts
        if expert not in experts:
            raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile", hint="try again")
        needy = dependants(expert, experts)
        if needy and not force:
            raise _needed(expert.ref, needy, f"expertctl remove {expert.ref} --force")
        freed = changes.remove(expert)
    warnings = [f"{ref} requires {expert.package} and will not run" for ref in needy]
    warnings += _forget(expert, catalogue, index)
    return Removed(expert.ref, freed, tuple(warnings))


def remove_base(wanted: str, *, bases: BaseStore, store: Store, force: bool = False) -> Removed:
    """Forget a base.

    Raises:
        NotFoundError: when it is not known.
        ConflictError: when experts need it and ``force`` is not given.
    """
    base = bases.find(wanted)
    others = [other for other in bases.bases() if other.name != base.name]
    needy = [expert.ref for expert in left_without(base, others, store.experts())]
    if needy and not force:
        raise _needed(base.name, needy, f"expertctl base remove {base.name} --force")
    bases.remove(base)
    warnings = [f"{ref} needs {base.name} and will not run" for ref in needy]
    return Removed(base.name, Freed(), tuple(warnings))


def left_without(
    base: StoredBase, others: Sequence[StoredBase], experts: Sequence[StoredExpert]
) -> list[StoredExpert]:
    """Return the experts that fit a base and none of the others."""
    return [
        expert
        for expert in experts
        if fits(expert.base, base) and not any(fits(expert.base, other) for other in others)
    ]


def fits(required: RequiredBase, base: StoredBase) -> bool:
    """Tell whether a base is what an installed expert was made for."""
    identity = base.identity
    tokenizer = identity.tokenizer_of(required.tokenizer_version)
    if (required.arch, required.tokenizer) != (identity.arch, tokenizer):
        return False
    if required.weights is None:
        return (required.name, required.revision) == (identity.name, identity.revision)
    return identity.weights in {required.weights, *required.accepts}


def _discard(damaged: DamagedRef, store: Store) -> Removed:
    with store.transaction() as changes:
        if damaged not in changes.scan().damaged:
            raise NotFoundError(
                f"the record of {damaged.name} was removed or replaced meanwhile", hint="try again"
            )
        changes.discard(damaged.path)
    hint = "its files stay until `expertctl gc`"
    return Removed(damaged.name, Freed(), (f"the record of {damaged.name} was damaged; {hint}",))


def _forget(
    expert: StoredExpert, catalogue: Catalogue | None, index: RoutingIndex | None
) -> list[str]:
    try:
        if catalogue is not None:
            catalogue.remove(expert)
        if index is not None:
            index.remove([expert.content_digest])
    except ExpertError as error:
        return [f"{expert.ref} is still in the index: {error.message}; `expertctl reindex`"]
    return []


def _needed(name: str, needy: Sequence[str], command: str) -> ConflictError:
    hint = f"remove those first, or `{command}`"
    return ConflictError(f"{name} is needed by {', '.join(needy)}", hint=hint)
