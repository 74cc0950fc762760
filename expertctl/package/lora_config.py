"""What the configuration of a LoRA or a DoRA decides about its tensors.

Foreign regular expressions are never run: the keys of ``rank_pattern`` and ``alpha_pattern`` are
literals for a linear matcher.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from expertctl.errors import InvalidPackageError
from expertctl.package.target_parameters import WEIGHT, is_turned, target_parameters
from expertctl.package.targets import literals, names_module
from expertctl.schema.strict_json import JsonObject

_INSIDE = r".*\."
"""Begins an alternative that must follow something and a dot."""
_LITERAL = re.compile(rf"(\^|{re.escape(_INSIDE)})?[A-Za-z0-9_.-]+\$?")
_ANYTHING = r"[^.]+\.[^.]+"
"""PEFT takes no number before the third place for a layer number."""
_PER_NAME = 16


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one key of ``rank_pattern`` or ``alpha_pattern`` means: any of some module suffixes."""

    alternatives: tuple[str, ...]

    @classmethod
    def parse(cls, key: str) -> "Pattern":
        r"""Read ``name``, ``a.b``, ``^whole.name`` and ``a|b``; ``.`` stands for any character.

        So is ``.*\.name``, which PEFT writes for stacks of experts: it must follow something.

        Raises:
            ValueError: for any other regular expression.
        """
        alternatives = tuple(_literal(part) for part in key.split("|"))
        if not all(_LITERAL.fullmatch(part) for part in alternatives):
            raise ValueError(f"{key[:80]!r} is a regular expression, and those are never run")
        return cls(alternatives)

    def matches(self, module: str) -> bool:
        r"""Tell whether PEFT's ``(.*\.)?(key)$`` matches a module name, in linear time."""
        return any(_ends_with(module, part.removesuffix("$")) for part in self.alternatives)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the configuration of a LoRA, or of a DoRA, decides about its tensors."""

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    target_modules: frozenset[str] | None
    """Literal module names; ``None`` where a pattern was given: then the tensors decide."""
    target_parameters: frozenset[str]
    """Names of parameters: stacks of routed experts, and weights of linear layers."""
    turned: bool
    """Whether the halves of stacks have changed places, each transposed."""
    exclude_modules: frozenset[str]
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["lora", "dora"]:
        """The kind of adapter."""
        return "dora" if self.use_dora else "lora"

    @property
    def pattern_size(self) -> int:
        """The highest cost of looking up one module: all characters, and a constant per name."""
        patterns = [p for p, _ in (*self.rank_pattern, *self.alpha_pattern)]
        return sum(_PER_NAME + len(part) for pattern in patterns for part in pattern.alternatives)

    def rank_of(self, module: str) -> int:
        """Return the rank that the configuration gives a module, or a stack of experts."""
        name = self._key(module)
        return next((r for p, r in self.rank_pattern if p.matches(name)), self.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha that the configuration gives a module, or a stack of experts."""
        name = self._key(module)
        return next((a for p, a in self.alpha_pattern if p.matches(name)), self.alpha)

    def scale_of(self, module: str) -> float:
        """Return the factor on ``B A x``: alpha / r, or alpha / √r with rsLoRA."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, name: str) -> bool:
        """Tell whether the configuration names a parameter, as PEFT chooses them."""
        return names_module(self.target_parameters, name)

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can mean a module, as PEFT chooses its targets."""
        if self.targets_parameter(f"{module}.{WEIGHT}"):
            return True
        if names_module(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return True
        if not names_module(self.target_modules, module):
            return False
        exact = module in self.target_modules
        return exact or self.layers_to_transform is None or self._layer_is_chosen(module)

    def _key(self, module: str) -> str:
        """Return what patterns are matched with: the weight of a module, where that is a target."""
        weight = f"{module}.{WEIGHT}"
        return weight if self.targets_parameter(weight) else module

    def _layer_is_chosen(self, module: str) -> bool:
        layer = layer_of(module, self.layers_pattern)
        return layer is not None and layer in (self.layers_to_transform or frozenset())


def lora_config_of(document: JsonObject, *, what: str) -> LoraConfig:
    """Return a configuration that the schema let through.

    Raises:
        InvalidPackageError: for a key of a pattern that is a regular expression.
    """
    values: dict[str, Any] = dict(document)
    layers = values.get("layers_to_transform")
    problems: list[str] = []
    modules, parameters = values.get("target_modules"), target_parameters(values, problems)
    if not parameters and modules == []:
        problems.append("target_modules: it names none, and target_parameters neither")
    config = LoraConfig(
        r=int(values["r"]),
        alpha=values["lora_alpha"],
        use_rslora=values.get("use_rslora", False),
        use_dora=bool(values.get("use_dora")),
        fan_in_fan_out=values.get("fan_in_fan_out", False),
        target_modules=frozenset() if parameters and modules is None else literals(modules),
        target_parameters=parameters,
        turned=is_turned(values, parameters, problems),
        exclude_modules=literals(values.get("exclude_modules")) or frozenset(),
        rank_pattern=tuple(
            (pattern, int(rank))
            for pattern, rank in _patterns(values.get("rank_pattern"), "rank_pattern", problems)
        ),
        alpha_pattern=_patterns(values.get("alpha_pattern"), "alpha_pattern", problems),
        layers_to_transform=_layers(layers),
        layers_pattern=_texts(values.get("layers_pattern")),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
    if problems:
        raise InvalidPackageError(what, problems)
    return config


def layer_of(module: str, patterns: tuple[str, ...]) -> int | None:
    """Return the layer number in a module name: the first one, or the first after a pattern.

    Patterns are tried in order, by plain search: both they and the name are untrusted.
    """
    before = [re.escape(pattern) for pattern in patterns] or [_ANYTHING]
    found = (re.search(rf"\.{words}\.([0-9]+)\.", f".{module}") for words in before)
    return next((int(match[1]) for match in found if match), None)


def _literal(part: str) -> str:
    """Return an alternative with its dots as they are, but for `_INSIDE` before it."""
    rest = part.removeprefix(_INSIDE)
    return part[: len(part) - len(rest)] + rest.replace("\\.", ".")


def _ends_with(module: str, part: str) -> bool:
    """Match a literal at the end of a name, after its start or a dot; ``.`` is any character."""
    inside = part.startswith(_INSIDE)
    whole = part.removeprefix(_INSIDE if inside else "^")
    start = len(module) - len(whole)
    if start < inside or (start > 0 and (part.startswith("^") or module[start - 1] != ".")):
        return False
    end = module[start:]
    return whole == end or (
        "." in whole and all(a in (".", b) for a, b in zip(whole, end, strict=True))
    )


def _texts(value: list[str] | str | None) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value or ())


def _layers(value: list[int] | int | None) -> frozenset[int] | None:
    if isinstance(value, (int, float)):
        return frozenset({int(value)})
    return frozenset(int(layer) for layer in value) if value else None


def _patterns(
    table: Mapping[str, Any] | None, field: str, problems: list[str]
) -> tuple[tuple[Pattern, Any], ...]:
    patterns = []
    for key, value in (table or {}).items():
        try:
            patterns.append((Pattern.parse(key), value))
        except ValueError as error:
            problems.append(f"{field}: {error}")
    return tuple(patterns)
