"""Base selection: one rule for every command and for the server.

1. The base that is named (``--base``, or the base that a server serves).
2. The base of the chosen experts. Named experts decide it; so do experts that the router chooses,
   unless they are made for the demo base.
3. The setting ``base``.
4. The most recently added base that is not the demo.
5. The demo, the base of the starter pack, if it is the only one.

Within each rule, bases that the engine cannot run come last.

The module also tells whether a home is new, so that the first run installs the starter pack.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertctl.errors import BaseMismatchError, ExpertError, NotFoundError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.compatibility import (
    HiddenSizes,
    build_add_base_hint,
    check_tensors,
    describe_mismatch,
    format_base_label,
    infer_hidden_size,
)
from expertctl.reference import DEMO_BASE
from expertctl.routing.candidate import InstalledExpert, explain_misfit, explain_untrusted
from expertctl.routing.request import RouteRequest
from expertctl.schema.manifest import BaseRequirement
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store

_DEMO_FILES = Path(__file__).parent.parent / "_starter" / "base"


@dataclass(frozen=True, slots=True)
class BaseSelector:
    """Chooses among the bases of a home when no base is named."""

    bases: BaseStore
    preferred: str | None = None
    """The setting ``base``."""

    def find_default(self) -> StoredBase | None:
        """Return the base that answers without experts, if any; raises as `list_by_preference`."""
        return next(iter(self.list_by_preference()), None)

    def list_by_preference(self, *, engine: str = "native") -> list[StoredBase]:
        """Return all bases, the default one first.

        Raises:
            NotFoundError: when the setting ``base`` names an unknown base.
        """
        known = self.bases.list_bases()
        by_default = sorted(known, key=lambda base: _preference_key(base, engine))
        if self.preferred is None or not known:
            return by_default
        first = self._find_preferred(self.preferred)
        return [first, *(base for base in by_default if base.name != first.name)]

    def select_bases(
        self, request: RouteRequest, experts: Sequence[InstalledExpert], *, base_name: str | None
    ) -> list[StoredBase]:
        """Return the bases to route a prompt on, the default first.

        There are several when the router may choose an expert made for another base than the
        default.

        Raises:
            NotFoundError: when there is no base, or none with this name; as `list_by_preference`.
        """
        if base_name is not None:
            return [self.bases.find(base_name)]
        ordered = self.list_by_preference(engine=request.config.engine)
        if not ordered:
            raise _no_base_error(next(_iter_forced_experts(request, experts), None))
        if request.force:
            return [next((b for b in ordered if _supports_forced(b, request, experts)), ordered[0])]
        if request.base_alone:
            return ordered[:1]
        usable = [expert for expert in experts if not explain_untrusted(expert)]
        others = [
            base
            for base in ordered[1:]
            if base.name != DEMO_BASE
            and not _is_unsupported(base, request.config.engine)
            and any(_fits(expert, base) for expert in usable)
        ]
        return [ordered[0], *others]

    def _find_preferred(self, name: str) -> StoredBase:
        try:
            return self.bases.find(name)
        except NotFoundError as error:
            hint = "`expertctl base list` shows the bases; `expertctl config set base NAME`"
            raise NotFoundError(f"the setting base: {error.message}", hint=hint) from error


def explain_mismatch(
    error: BaseMismatchError,
    request: RouteRequest,
    experts: Sequence[InstalledExpert],
    base: StoredBase,
    *,
    known: Sequence[StoredBase],
    is_named: bool,
    adapters: Callable[[InstalledExpert], Sequence[AdapterSpec]],
) -> BaseMismatchError:
    """Return an error that says which base the named experts need and how to use them.

    ``adapters`` reads the adapters of an expert. ``--allow-base-mismatch`` is suggested only if all
    tensor shapes match the base; otherwise it would fail as well.
    """
    expert = next((e for e in _iter_forced_experts(request, experts) if not _fits(e, base)), None)
    if expert is None:
        return error
    required, widths = expert.manifest.base, collect_hidden_sizes(known)
    message = f"{expert.ref} {describe_mismatch(required, base.identity, widths)}"
    suited = next((other for other in known if _fits(expert, other)), None)
    ways = [_format_add_command(required)]
    if suited is not None:
        ways = [f"`--base {suited.name}`", *(["leave out --base"] if is_named else [])]
    elif all(other.name != required.name for other in known):
        message += f"; {format_base_label(required.name, required.revision)} is not added here"
    if _shapes_match(expert, base, adapters):
        ways.append("accept the risk with --allow-base-mismatch")
    return BaseMismatchError(message, hint=", or ".join(ways))


def collect_hidden_sizes(bases: Sequence[StoredBase]) -> HiddenSizes:
    """Return the hidden size of each architecture among these bases, where it can be inferred."""
    known = ((str(base.identity.arch), infer_hidden_size(base.shapes)) for base in bases)
    return {arch: width for arch, width in known if width is not None}


def _shapes_match(
    expert: InstalledExpert,
    base: StoredBase,
    adapters: Callable[[InstalledExpert], Sequence[AdapterSpec]],
) -> bool:
    try:
        return not any(check_tensors(spec, base.shapes) for spec in adapters(expert))
    except ExpertError:  # the files are damaged; a run reports that
        return False


def _iter_forced_experts(
    request: RouteRequest, experts: Sequence[InstalledExpert]
) -> Iterator[InstalledExpert]:
    for forced in request.force:
        meant = [expert for expert in experts if expert.matches(forced.target)]
        if meant:
            yield max(meant, key=lambda expert: expert.precedence)


def _no_base_error(expert: InstalledExpert | None) -> NotFoundError:
    """Return the error for a home without bases; names the base that a forced expert needs."""
    if expert is None:
        hint = "add one with `expertctl base add DIR`"
        return NotFoundError("no base model is known", hint=hint)
    required = expert.manifest.base
    needed = f"{expert.ref} needs {format_base_label(required.name, required.revision)}"
    return NotFoundError(f"no base model is known; {needed}", hint=_format_add_command(required))


def _format_add_command(required: BaseRequirement) -> str:
    """Return the command that adds a base; the files of the demo are part of this package."""
    if required.name == DEMO_BASE:
        return f"`expertctl base add {shlex.quote(str(_DEMO_FILES))} --name {DEMO_BASE}`"
    return build_add_base_hint(required)


def _preference_key(base: StoredBase, engine: str) -> tuple[bool, bool, int]:
    return base.name == DEMO_BASE, _is_unsupported(base, engine), -base.added_ns


def _is_unsupported(base: StoredBase, engine: str) -> bool:
    return base.foreign and engine == "native"


def _fits(expert: InstalledExpert, base: StoredBase) -> bool:
    return not explain_misfit(expert, base.identity, allow_mismatch=False)


def _supports_forced(
    base: StoredBase, request: RouteRequest, experts: Sequence[InstalledExpert]
) -> bool:
    return all(
        any(_fits(expert, base) for expert in experts if expert.matches(forced.target))
        for forced in request.force
    )


STARTER_NAMESPACE = "starter"
"""The namespace of the starter pack."""


def is_home_empty(store: Store, bases: BaseStore) -> bool:
    """Tell whether a home has neither an expert nor a base."""
    return not store.list_experts() and not bases.list_bases()


def lacks_starter(store: Store, bases: BaseStore) -> bool:
    """Tell whether a home has neither the base nor an expert of the starter pack."""
    of_pack = (
        expert for expert in store.list_experts() if expert.package.namespace == STARTER_NAMESPACE
    )
    return (
        all(base.name != DEMO_BASE for base in bases.list_bases()) and next(of_pack, None) is None
    )
