"""The ``model`` of a request: a base, ``auto``, or a plan of installed experts.

Nothing is loaded or looked up here: a name that is neither the base nor ``auto`` nor a list of
package names is not found. It cannot contain paths, addresses or registries.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.routing.presets import LIMITS
from expertctl.routing.request import Forced, parse_forced

AUTO = "auto"
MAX_LENGTH = 2000
_EXPERT = re.compile(rf"{NAME_PATTERN}/{NAME_PATTERN}(@[0-9A-Za-z.^~<>=,*-]+)?(:[0-9.eE+-]+)?")
_BETWEEN = re.compile(r"\+(?=[a-z0-9-]+/)")
"""A plus sign that separates two experts; any other belongs to a number."""


class ModelNotFoundError(NotFoundError):
    """The name is neither the base, nor ``auto``, nor a list of experts."""

    code: ClassVar[str] = "model_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What shall answer: named experts, the base alone, or experts that the router finds."""

    force: tuple[Forced, ...] = ()
    base_alone: bool = False
    auto: bool = False


def names_experts(model: str) -> bool:
    """Tell whether a name has the form of one or several experts, installed or not."""
    parts = _BETWEEN.split(model) if len(model) <= MAX_LENGTH else []
    return bool(parts) and all(_EXPERT.fullmatch(part) for part in parts)


def chosen(
    model: str, *, base_name: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> Choice:
    """Read the ``model`` of a request to a server of one base.

    Raises:
        ModelNotFoundError: when the name is not a model.
        UsageError: when there are too many experts, or a weight is not in its limits.
    """
    model = aliases.get(model, model)
    if model == base_name:
        return Choice(base_alone=True)
    if model == AUTO:
        return Choice(auto=True)
    if not names_experts(model):
        hint = f"{base_name}, auto, or experts such as acme/sql or acme/sql:0.5+acme/json"
        raise ModelNotFoundError(f"there is no model {model[:80]!r} here", hint=hint)
    parts = _BETWEEN.split(model)
    _, most = LIMITS["max_experts"]
    if len(parts) > most:
        raise UsageError(f"{len(parts)} experts in one model, at most {most:g} are allowed")
    return Choice(force=tuple(parse_forced(part) for part in parts))
