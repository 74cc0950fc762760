"""Aliases: further names of models, such as ``gpt-4o-mini`` for ``auto``.

Many clients send the name of a model that they know and cannot be told another. An alias never
replaces a name that means something here: the names of bases, ``auto``, and whatever looks like the
name of an expert are refused, so that an expert that is installed later cannot be shadowed either.
An alias names a model, not another alias. A server does not start with an alias that cannot be
answered; an expert that is removed later is missed by the request that needs it.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from expertctl.errors import NotFoundError, UsageError
from expertctl.server.model_name import AUTO, Choice, chosen, names_experts
from expertctl.store.store import Store, near_names

MAX_ALIASES = 100
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,199}")
_HINT = "write --alias gpt-4o-mini=auto"


def parse_aliases(texts: Iterable[str]) -> Mapping[str, str]:
    """Read ``ALIAS=MODEL`` texts.

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


def check_names(aliases: Mapping[str, str]) -> None:
    """Check the form of aliases, and of the models that they stand for.

    Raises:
        UsageError: naming the alias, and what it would shadow.
    """
    if len(aliases) > MAX_ALIASES:
        raise UsageError(f"{len(aliases)} aliases, at most {MAX_ALIASES} are allowed")
    for alias, model in aliases.items():
        if alias == AUTO:
            raise UsageError(f"the alias {AUTO} would hide the model {AUTO}", hint=_HINT)
        if names_experts(alias):
            raise UsageError(
                f"the alias {alias} has the form of an expert's name and would hide that expert",
                hint="choose a name without a slash",
            )
        if not _ALIAS.fullmatch(alias):
            raise UsageError(f"the alias {alias[:80]!r} is not the name of a model", hint=_HINT)
        if model in aliases:
            raise UsageError(
                f"the alias {alias} stands for {model}, which is an alias itself",
                hint="give the model that it stands for",
            )
        named_experts(alias, model)


def named_experts(alias: str, model: str) -> Choice | None:
    """Return the experts that an alias stands for; None if it stands for a base or ``auto``.

    Raises:
        UsageError: when a version or a weight is malformed, or there are too many experts.
    """
    if not names_experts(model):
        return None
    try:
        return chosen(model, base_name="")
    except UsageError as error:
        raise UsageError(f"the alias {alias}: {error.message}", hint=error.hint) from error


def check_bases(aliases: Mapping[str, str], bases: Collection[str]) -> None:
    """Check aliases against the bases of a home.

    Raises:
        UsageError: when an alias is the name of a base.
        NotFoundError: when it stands for no model; the hint names what is near.
    """
    for alias, model in aliases.items():
        if alias in bases:
            raise UsageError(
                f"the alias {alias} would hide the base {alias}", hint="choose another name"
            )
        if model != AUTO and model not in bases and not names_experts(model):
            near = near_names(model, [AUTO, *bases])
            meant = f"did you mean {' or '.join(near)}? Else " if near else ""
            raise NotFoundError(
                f"the alias {alias} stands for {model[:80]!r}, which is no model",
                hint=f"{meant}give {AUTO}, a base, or experts such as acme/sql",
            )


def check_installed(aliases: Mapping[str, str], store: Store) -> None:
    """Check that the experts that aliases stand for are installed.

    Raises:
        NotFoundError: naming the alias and the expert; the hint names what is near.
    """
    for alias, model in aliases.items():
        choice = named_experts(alias, model)
        for forced in choice.force if choice else ():
            try:
                store.find(forced.target)
            except NotFoundError as error:
                hint = f"{error.hint}; or `expertctl install {forced.target}`"
                raise NotFoundError(f"the alias {alias}: {error.message}", hint=hint) from error


def check_served(aliases: Mapping[str, str], *, base: str, bases: Collection[str]) -> None:
    """Check that aliases stand for no other base than the one that is served.

    Raises:
        UsageError: naming the alias and both bases.
    """
    for alias, model in aliases.items():
        if model in bases and model != base:
            raise UsageError(
                f"the alias {alias} stands for the base {model}, but {base} is served",
                hint=f"give {base}, or serve {model} with --base {model}",
            )
