"""Which base answers: one rule for every command and for the server.

1. The base that is named (``--base``, or the base that a server serves).
2. The base of the chosen experts. Experts that are named decide it; experts that the router
   chooses do, too, unless they are made for the demo alone.
3. The setting ``base``.
4. The base that was added last and is not the demo.
5. The demo, the base of the starter pack, when it is alone.

A base that the engine does not run comes behind those that it runs.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertctl.errors import BaseMismatchError, ExpertError, NotFoundError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.compatibility import (
    Widths,
    add_base_hint,
    check_tensors,
    describe_mismatch,
    hidden_size,
    label,
)
from expertctl.routing.candidate import Installed, misfit, untrusted
from expertctl.routing.request import RouteRequest
from expertctl.schema.manifest import BaseRequirement
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

DEMO = "starter/base"
"""The name of the demo: `expertctl.install.starter` adds it to a new home."""
_DEMO_FILES = Path(__file__).parent.parent / "_starter" / "base"


@dataclass(frozen=True, slots=True)
class BaseRule:
    """What decides between the bases of a home where no base is named."""

    bases: BaseStore
    preferred: str | None = None
    """The setting ``base``."""

    def default(self, *, engine: str = "native") -> StoredBase | None:
        """Return the base that answers where no expert is chosen; None when there is none.

        Raises:
            NotFoundError: when the setting names none that is known.
        """
        return next(iter(self.ordered(engine=engine)), None)

    def ordered(self, *, engine: str = "native") -> list[StoredBase]:
        """Return all bases, the one that answers by default first.

        Raises:
            NotFoundError: when the setting names none that is known.
        """
        known = self.bases.bases()
        by_default = sorted(known, key=lambda base: _rank(base, engine))
        if self.preferred is None or not known:
            return by_default
        first = self._named_in_settings(self.preferred)
        return [first, *(base for base in by_default if base.name != first.name)]

    def answering(
        self, request: RouteRequest, experts: Sequence[Installed], *, named: str | None
    ) -> list[StoredBase]:
        """Return the bases that a prompt is routed on, the default first.

        There are several where the router may choose an expert of another base than the default.

        Raises:
            NotFoundError: when there is no base, or none of the name.
        """
        if named is not None:
            return [self.bases.find(named)]
        ordered = self.ordered(engine=request.engine)
        if not ordered:
            raise _no_base(next(_named(request, experts), None))
        if request.force:
            return [next((b for b in ordered if _suits(b, request, experts)), ordered[0])]
        if request.base_alone:
            return ordered[:1]
        usable = [expert for expert in experts if not untrusted(expert)]
        others = [
            base
            for base in ordered[1:]
            if base.name != DEMO
            and not _is_beyond(base, request.engine)
            and any(_fits(expert, base) for expert in usable)
        ]
        return [ordered[0], *others]

    def _named_in_settings(self, name: str) -> StoredBase:
        try:
            return self.bases.find(name)
        except NotFoundError as error:
            hint = "`expertctl base list` shows the bases; `expertctl config set base NAME`"
            raise NotFoundError(f"the setting base: {error.message}", hint=hint) from error


def explain_mismatch(
    error: BaseMismatchError,
    request: RouteRequest,
    experts: Sequence[Installed],
    base: StoredBase,
    *,
    known: Sequence[StoredBase],
    named: bool,
    adapters: Callable[[Installed], Sequence[AdapterSpec]],
) -> BaseMismatchError:
    """Say which base the named experts need, and how they can answer there.

    ``adapters`` reads those of an expert. ``--allow-base-mismatch`` is mentioned only where the
    shapes of modules agree, else it would fail, too.
    """
    expert = next((e for e in _named(request, experts) if not _fits(e, base)), None)
    if expert is None:
        return error
    required, widths = expert.manifest.base, widths_of(known)
    message = f"{expert.ref} {describe_mismatch(required, base.identity, widths)}"
    suited = next((other for other in known if _fits(expert, other)), None)
    ways = [_how_to_add(required)]
    if suited is not None:
        ways = [f"`--base {suited.name}`", *(["leave out --base"] if named else [])]
    elif all(other.name != required.name for other in known):
        message += f"; {label(required.name, required.revision)} is not added here"
    if _could_work(expert, base, adapters):
        ways.append("accept the risk with --allow-base-mismatch")
    return BaseMismatchError(message, hint=", or ".join(ways))


def widths_of(bases: Sequence[StoredBase]) -> Widths:
    """Return the hidden size of each architecture among some bases, where that shows."""
    known = ((str(base.identity.arch), hidden_size(base.shapes)) for base in bases)
    return {arch: width for arch, width in known if width is not None}


def _could_work(
    expert: Installed, base: StoredBase, adapters: Callable[[Installed], Sequence[AdapterSpec]]
) -> bool:
    """Tell whether the shapes of all modules of an expert are those of a base."""
    try:
        return not any(check_tensors(spec, base.shapes) for spec in adapters(expert))
    except ExpertError:  # the files are damaged, as a run would say
        return False


def _named(request: RouteRequest, experts: Sequence[Installed]) -> Iterator[Installed]:
    """Yield the expert that each reference of a request means, where it is installed."""
    for forced in request.force:
        meant = [expert for expert in experts if expert.is_meant(forced.target)]
        if meant:
            yield max(meant, key=lambda expert: expert.precedence)


def _no_base(expert: Installed | None) -> NotFoundError:
    """Return the error for a home without bases; a named expert says which one it needs."""
    if expert is None:
        hint = "add one with `expertctl base add DIR`"
        return NotFoundError("no base model is known", hint=hint)
    required = expert.manifest.base
    needed = f"{expert.ref} needs {label(required.name, required.revision)}"
    return NotFoundError(f"no base model is known; {needed}", hint=_how_to_add(required))


def _how_to_add(required: BaseRequirement) -> str:
    """Return the command that adds a base; the demo is among our own files."""
    if required.name == DEMO:
        return f"`expertctl base add {shlex.quote(str(_DEMO_FILES))} --name {DEMO}`"
    return add_base_hint(required)


def _rank(base: StoredBase, engine: str) -> tuple[bool, bool, int]:
    return base.name == DEMO, _is_beyond(base, engine), -base.added_ns


def _is_beyond(base: StoredBase, engine: str) -> bool:
    """Tell whether the engine that is asked for does not run a base."""
    return base.foreign and engine == "native"


def _fits(expert: Installed, base: StoredBase) -> bool:
    return not misfit(expert, base.identity, allow_mismatch=False)


def _suits(base: StoredBase, request: RouteRequest, experts: Sequence[Installed]) -> bool:
    """Tell whether every forced expert has a version for this base."""
    return all(
        any(_fits(expert, base) for expert in experts if expert.is_meant(forced.target))
        for forced in request.force
    )
