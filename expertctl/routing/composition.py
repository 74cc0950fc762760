"""Which experts may stand in one plan, what they need beside them, and in which order.

Composition is a capability, not a default: a second expert joins only when both say so, each one's
``composes_with`` naming the other's ``role``, or when the two were measured to gain. What an expert
requires comes with it, before it, whatever ``load_order`` says; experts that the user names keep
the user's order.
"""

from collections.abc import Iterable, Mapping, Sequence

from expertctl.digest import Digest
from expertctl.errors import ConflictError, IncompatibleError, MissingDependencyError
from expertctl.reference import Reference
from expertctl.routing.candidate import Installed

LONGEST_CHAIN = 10
"""The most experts of any plan."""
_ONE_OF_THEM = "name one of them, or leave one out with --exclude"

Gains = Mapping[tuple[Digest, Digest], float]
"""Two experts in plan order → what the second was measured to add to the first."""

_Offered = tuple[Sequence[Installed], Sequence[Installed]]
"""What is present in the plan, and what else is usable."""


def with_requirements(
    expert: Installed, usable: Sequence[Installed], *, present: Sequence[Installed] = ()
) -> list[Installed]:
    """Return an expert with all that it requires, requirements first.

    A version that is ``present`` in the plan will do; else the newest usable one is taken.

    Raises:
        MissingDependencyError: when something required is not among the usable experts.
        IncompatibleError: when it and all that it requires are too many for any plan.
    """
    needed: dict[str, Installed] = {}
    _collect(expert, (present, usable), needed)
    return [*(e for e in needed.values() if e.digest != expert.digest), expert]


def check_together(experts: Sequence[Installed]) -> None:
    """Check that no two of these experts exclude each other and none is in too long a chain.

    Raises:
        ConflictError: naming the two.
        IncompatibleError: naming the expert that allows fewer.
    """
    for i, one in enumerate(experts):
        for other in experts[i + 1 :]:
            _check_pair(one, other)
    for expert in experts:
        most = expert.manifest.composition.max_chain
        if len(experts) > most:
            message = f"{expert.ref} allows at most {most} experts in a plan"
            hint = "name fewer, or leave it out"
            raise IncompatibleError(f"{message}, this one has {len(experts)}", hint=hint)


def check_context(experts: Sequence[Installed], context: int) -> None:
    """Check that the soft prompts of these experts leave something of a base's context.

    Raises:
        IncompatibleError: when they do not.
    """
    tokens = sum(expert.manifest.virtual_tokens for expert in experts)
    if tokens >= context:
        names = ", ".join(expert.ref for expert in experts if expert.manifest.virtual_tokens)
        raise IncompatibleError(
            f"{names}: {tokens} virtual tokens, the base reads {context} tokens in all",
            hint="use fewer experts with soft prompts",
        )


def not_composing(newcomer: Installed, chosen: Iterable[Installed], gains: Gains) -> str:
    """Say why an expert may not join others of its own accord; empty when it may."""
    for other in chosen:
        if _has_gained(newcomer, other, gains):
            continue
        for one, two in ((newcomer, other), (other, newcomer)):
            role = two.manifest.composition.role
            if role is None or role not in one.manifest.composition.composes_with:
                return f"{one.ref} does not declare that it composes with {two.ref}"
    return ""


def _has_gained(one: Installed, two: Installed, gains: Gains) -> bool:
    """Tell whether two experts were measured together and were better than one."""
    return any(
        gains.get(pair, 0) > 0 for pair in ((one.digest, two.digest), (two.digest, one.digest))
    )


def in_plan_order(experts: Iterable[Installed]) -> list[Installed]:
    """Sort by ``load_order``, requirements before what requires them; else keep the order."""
    waiting = sorted(experts, key=lambda expert: expert.manifest.composition.load_order)
    placed: dict[str, Installed] = {}
    for expert in waiting:
        _place(expert, waiting, placed)
    return list(placed.values())


def requirements_in(expert: Installed, experts: Iterable[Installed]) -> list[Installed]:
    """Return those of some experts that an expert requires."""
    wanted = [Reference.parse(text) for text in expert.manifest.composition.requires]
    return [other for other in experts if any(map(other.is_meant, wanted))]


def _place(expert: Installed, experts: Sequence[Installed], placed: dict[str, Installed]) -> None:
    """Put an expert after what it requires; a circle is broken somewhere."""
    if expert.ref in placed:
        return
    placed[expert.ref] = expert
    for needed in requirements_in(expert, experts):
        _place(needed, experts, placed)
    placed[expert.ref] = placed.pop(expert.ref)


def _collect(expert: Installed, offered: _Offered, needed: dict[str, Installed]) -> None:
    if expert.ref in needed:
        return
    needed[expert.ref] = expert
    if len(needed) > LONGEST_CHAIN:
        first = next(iter(needed))
        raise IncompatibleError(
            f"{first} and all that it requires are more than {LONGEST_CHAIN} experts",
            hint="its publisher has to require fewer",
        )
    for text in expert.manifest.composition.requires:
        _collect(_required(expert, text, offered), offered, needed)
    needed[expert.ref] = needed.pop(expert.ref)  # after what it requires


def _required(expert: Installed, text: str, offered: _Offered) -> Installed:
    wanted = Reference.parse(text)
    found = next(filter(None, ([e for e in some if e.is_meant(wanted)] for some in offered)), None)
    if found is None:
        raise MissingDependencyError(
            f"{expert.ref} requires {text}, and no such expert can be used",
            hint=f"install it: `expertctl install {text}`",
        )
    return max(found, key=lambda e: e.precedence)


def _check_pair(one: Installed, other: Installed) -> None:
    for a, b in ((one, other), (other, one)):
        hits = [t for t in a.manifest.composition.conflicts if b.is_meant(Reference.parse(t))]
        if hits:
            message = f"{a.ref} conflicts with {b.ref}: it declares {hits[0]}"
            raise ConflictError(message, hint=_ONE_OF_THEM)
    if one.stored.package == other.stored.package:
        message = f"{one.ref} and {other.ref} are versions of one package"
        raise ConflictError(message, hint=_ONE_OF_THEM)
