"""Which base answers: one rule for every command and for the server.

1. The base that is named (``--base``, or the base that a server serves).
2. The base of the chosen experts. Experts that are named decide it; experts that the router
   chooses do, too, unless they are made for the demo alone.
3. The setting ``base``.
4. The base that was added last and is not the demo.
5. The demo, the base of the starter pack, when it is alone.

A base that the engine does not run comes behind those that it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.errors import NotFoundError
from expertctl.routing.candidate import Installed, misfit, untrusted
from expertctl.routing.request import RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

DEMO = "starter/base"
"""The name of the demo: `expertctl.install.starter` adds it to a new home."""


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
            hint = "add one with `expertctl base add DIR`"
            raise NotFoundError("no base model is known", hint=hint)
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
