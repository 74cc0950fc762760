"""The ``model`` of a request: the served base, ``auto``, a plan of installed experts, or an alias.

Parsing loads and looks up nothing: a name that is neither the base nor ``auto`` nor a list of
package names is not found. It cannot contain paths, URLs or registries.

Aliases are further model names, such as ``gpt-4o-mini`` for ``auto``, for clients whose model name
cannot be changed. An alias never replaces a name that already means something: names of bases,
``auto``, and anything of the form of an expert's name are refused, so an expert installed later
cannot be shadowed either. An alias stands for a model, not for another alias. A server does not
start with an alias it cannot serve; if an expert is removed later, requests that need it fail.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.routing.request import LIMITS, ForcedExpert, parse_forced
from expertctl.store.store import Store, find_similar_names

AUTO = "auto"
MAX_MODEL_LENGTH = 2000
_EXPERT = re.compile(rf"{NAME_PATTERN}/{NAME_PATTERN}(@[0-9A-Za-z.^~<>=,*-]+)?(:[0-9.eE+-]+)?")
_SEPARATOR = re.compile(r"\+(?=[a-z0-9-]+/)")
"""A plus sign that separates two experts; any other is part of a number."""


class ModelNotFoundError(NotFoundError):
    """The name is neither the base, nor ``auto``, nor a list of experts."""

    code: ClassVar[str] = "model_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    """What answers: named experts, the base alone, or experts chosen by the router."""

    force: tuple[ForcedExpert, ...] = ()
    base_alone: bool = False
    auto: bool = False


def is_expert_list(model: str) -> bool:
    """Tell whether a name has the form of one or more experts, installed or not."""
    parts = _SEPARATOR.split(model) if len(model) <= MAX_MODEL_LENGTH else []
    return bool(parts) and all(_EXPERT.fullmatch(part) for part in parts)


def parse_model(
    model: str, *, base_name: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> ModelSelection:
    """Parse the ``model`` of a request to a server of one base.

    Raises:
        ModelNotFoundError: when the name is not a model.
        UsageError: when there are too many experts, or a weight is out of range.
    """
    model = aliases.get(model, model)
    if model == base_name:
        return ModelSelection(base_alone=True)
    if model == AUTO:
        return ModelSelection(auto=True)
    if not is_expert_list(model):
        hint = f"{base_name}, auto, or experts such as acme/sql or acme/sql:0.5+acme/json"
        raise ModelNotFoundError(f"there is no model {model[:80]!r} here", hint=hint)
    parts = _SEPARATOR.split(model)
    _, most = LIMITS["max_experts"]
    if len(parts) > most:
        raise UsageError(f"{len(parts)} experts in one model, at most {most:g} are allowed")
    return ModelSelection(force=tuple(parse_forced(part) for part in parts))


MAX_ALIASES = 100
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,199}")
_HINT = "write --alias gpt-4o-mini=auto"


def parse_aliases(texts: Iterable[str]) -> Mapping[str, str]:
    """Parse ``ALIAS=MODEL`` options.

    Raises:
        UsageError: when one is malformed, or an alias is given twice.
    """
    aliases: dict[str, str] = {}
    for text in texts:
        alias, equals, model = (part.strip() for part in text.partition("="))
        if not (alias and equals and model):
            raise UsageError(f"the alias {text[:80]!r} is not ALIAS=MODEL", hint=_HINT)
        if alias in aliases:
            raise UsageError(f"the alias {alias[:80]!r} is given twice", hint="leave one out")
        aliases[alias] = model
    return aliases


def check_alias_names(aliases: Mapping[str, str]) -> None:
    """Check the form of aliases and of the models they stand for.

    Raises:
        UsageError: names the alias and what it would shadow.
    """
    if len(aliases) > MAX_ALIASES:
        raise UsageError(f"{len(aliases)} aliases, at most {MAX_ALIASES} are allowed")
    for alias, model in aliases.items():
        if alias == AUTO:
            raise UsageError(f"the alias {AUTO} would hide the model {AUTO}", hint=_HINT)
        if is_expert_list(alias):
            raise UsageError(
                f"the alias {alias} has the form of an expert's name and would hide that expert",
                hint="choose a name without a slash",
            )
        if not _ALIAS.fullmatch(alias):
            raise UsageError(f"the alias {alias[:80]!r} is not a valid model name", hint=_HINT)
        if model in aliases:
            raise UsageError(
                f"the alias {alias} stands for {model}, which is an alias itself",
                hint="give the model that it stands for",
            )
        parse_alias_experts(alias, model)


def parse_alias_experts(alias: str, model: str) -> ModelSelection | None:
    """Return the experts an alias stands for; None for a base or ``auto``.

    Raises:
        UsageError: when a version or a weight is malformed, or there are too many experts.
    """
    if not is_expert_list(model):
        return None
    try:
        return parse_model(model, base_name="")
    except UsageError as error:
        raise UsageError(f"the alias {alias}: {error.message}", hint=error.hint) from error


def check_alias_bases(aliases: Mapping[str, str], bases: Collection[str]) -> None:
    """Check aliases against the registered bases.

    Raises:
        UsageError: when an alias is the name of a base.
        NotFoundError: when it stands for no model; the hint suggests similar names.
    """
    for alias, model in aliases.items():
        if alias in bases:
            raise UsageError(
                f"the alias {alias} would hide the base {alias}", hint="choose another name"
            )
        if model != AUTO and model not in bases and not is_expert_list(model):
            near = find_similar_names(model, [AUTO, *bases])
            meant = f"did you mean {' or '.join(near)}? Else " if near else ""
            raise NotFoundError(
                f"the alias {alias} stands for {model[:80]!r}, which is no model",
                hint=f"{meant}give {AUTO}, a base, or experts such as acme/sql",
            )


def check_alias_experts(aliases: Mapping[str, str], store: Store) -> None:
    """Check that the experts named by aliases are installed.

    Raises:
        NotFoundError: names the alias and the expert; the hint suggests similar names.
    """
    for alias, model in aliases.items():
        choice = parse_alias_experts(alias, model)
        for forced in choice.force if choice else ():
            try:
                store.find(forced.target)
            except NotFoundError as error:
                hint = f"{error.hint}; or `expertctl install {forced.target}`"
                raise NotFoundError(f"the alias {alias}: {error.message}", hint=hint) from error


def check_alias_base(aliases: Mapping[str, str], *, base: str, bases: Collection[str]) -> None:
    """Check that aliases stand for no base other than the served one.

    Raises:
        UsageError: names the alias and both bases.
    """
    for alias, model in aliases.items():
        if model in bases and model != base:
            raise UsageError(
                f"the alias {alias} stands for the base {model}, but {base} is served",
                hint=f"give {base}, or serve {model} with --base {model}",
            )
