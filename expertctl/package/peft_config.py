"""PEFT configurations as values: which modules an adapter changes, and how its tensors are read.

Modules are matched as PEFT chooses its targets. Foreign regular expressions are never run: the keys
of ``rank_pattern`` and ``alpha_pattern`` are literals for a linear-time matcher.

A LoRA may also change bare parameters (``target_parameters``): stacks of routed experts, and
weights of linear layers; the schema allows no others. In transformers 5 a layer keeps the matrices
of its routed experts in two stacks, and PEFT stores the LoRA of all experts of a stack in two
tensors. Which tensor is A and which is B depends on PEFT's version.

PEFT saves a soft prompt as the output of its prompt encoder, so the settings of the encoder and of
the initialisation have no effect any more; the tokenizer that they name is never opened.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject


def parse_literals(value: Iterable[str] | str | None) -> frozenset[str] | None:
    """Return a list of module names; ``None`` for a pattern, which is never run, and None."""
    return None if value is None or isinstance(value, str) else frozenset(value)


def matches_module(names: frozenset[str], module: str) -> bool:
    """Tell whether a module or a dotted suffix of it is in ``names``, however many there are."""
    while module not in names:
        _, dot, module = module.partition(".")
        if not dot:
            return False
    return True


STACKED_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stacks of a layer in order, and the matrices of one expert in each, by rows."""
WEIGHT_PARAMETER = "weight"
"""The name of a linear layer's matrix."""
_RELEASE_PATTERN = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(?P<rest>.{0,90})", re.DOTALL
)
_TRANSPOSED_RELEASE = (0, 19, 1)
"""Before this version, PEFT read a stack [experts, out, in] as [experts, in, out]."""
_FIRST_RELEASE = (0, 18, 0)
"""Before this version, PEFT did not write its version."""


def parse_target_parameters(values: Mapping[str, Any], problems: list[str]) -> frozenset[str]:
    """Return the parameters that a configuration names; empty if it names only modules."""
    names = frozenset(values.get("target_parameters") or ())
    for field in ("use_dora", "fan_in_fan_out"):
        if names and values.get(field):
            problems.append(f"target_parameters: PEFT has no {field} for parameters")
    return names


def is_transposed(values: Mapping[str, Any], names: frozenset[str], problems: list[str]) -> bool:
    """Tell whether A and B of stacks are swapped, each transposed."""
    if not any(name.rpartition(".")[2] in STACKED_MODULES for name in names):
        return False
    version = values.get("peft_version")
    release = _RELEASE_PATTERN.match(version) if isinstance(version, str) else None
    found = tuple(map(int, release.groups()[:3])) if release else (0, 0, 0)
    unclear = release is not None and ("dev" in release["rest"] or "rc" in release["rest"])
    if found < _FIRST_RELEASE or (unclear and found <= _TRANSPOSED_RELEASE):
        problems.append(
            f"target_parameters: peft_version {str(version)[:40]!r} does not tell how "
            "stacked tensors are stored; adapters saved by release 0.18.0 or later do"
        )
    return found < _TRANSPOSED_RELEASE


_ANY_PREFIX = r".*\."
"""Begins an alternative that must follow something and a dot."""
_LITERAL = re.compile(rf"(\^|{re.escape(_ANY_PREFIX)})?[A-Za-z0-9_.-]+\$?")
_DEFAULT_LAYER_PREFIX = r"[^.]+\.[^.]+"
"""PEFT does not take a number before the third component for a layer number."""
_COST_PER_NAME = 16


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One key of ``rank_pattern`` or ``alpha_pattern``: any of some module suffixes."""

    alternatives: tuple[str, ...]

    @classmethod
    def parse(cls, key: str) -> "ModulePattern":
        r"""Parse ``name``, ``a.b``, ``^whole.name`` and ``a|b``; ``.`` stands for any character.

        ``.*\.name``, which PEFT writes for stacks of experts, must follow something.

        Raises:
            ValueError: for any other regular expression.
        """
        alternatives = tuple(_escape_literal(part) for part in key.split("|"))
        if not all(_LITERAL.fullmatch(part) for part in alternatives):
            raise ValueError(f"{key[:80]!r} is a regular expression, which is never run")
        return cls(alternatives)

    def matches(self, module: str) -> bool:
        r"""Tell whether PEFT's ``(.*\.)?(key)$`` matches a module name, in linear time."""
        return any(_ends_with(module, part.removesuffix("$")) for part in self.alternatives)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The configuration of a LoRA or a DoRA."""

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    target_modules: frozenset[str] | None
    """Literal module names; ``None`` for a pattern: then the tensors decide."""
    target_parameters: frozenset[str]
    """Names of parameters: stacks of routed experts, and weights of linear layers."""
    transposed: bool
    """Whether A and B of stacks are swapped, each transposed."""
    exclude_modules: frozenset[str]
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
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
        """The maximum cost of looking up one module: all characters, and a constant per name."""
        patterns = [p for p, _ in (*self.rank_pattern, *self.alpha_pattern)]
        return sum(
            _COST_PER_NAME + len(part) for pattern in patterns for part in pattern.alternatives
        )

    def rank_for(self, module: str) -> int:
        """Return the rank of a module or a stack of experts."""
        name = self._pattern_key(module)
        return next((r for p, r in self.rank_pattern if p.matches(name)), self.r)

    def alpha_for(self, module: str) -> float:
        """Return the alpha of a module or a stack of experts."""
        name = self._pattern_key(module)
        return next((a for p, a in self.alpha_pattern if p.matches(name)), self.alpha)

    def scale_for(self, module: str) -> float:
        """Return the factor on ``B A x``: alpha / r, or alpha / √r with rsLoRA."""
        rank = self.rank_for(module)
        return self.alpha_for(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, name: str) -> bool:
        """Tell whether the configuration targets a parameter, by PEFT's rules."""
        return matches_module(self.target_parameters, name)

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can target a module, by PEFT's rules."""
        if self.targets_parameter(f"{module}.{WEIGHT_PARAMETER}"):
            return True
        if matches_module(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return True
        if not matches_module(self.target_modules, module):
            return False
        exact = module in self.target_modules
        return exact or self.layers_to_transform is None or self._layer_is_chosen(module)

    def _pattern_key(self, module: str) -> str:
        """Return the name that patterns match: a module's weight, if that is a target."""
        weight = f"{module}.{WEIGHT_PARAMETER}"
        return weight if self.targets_parameter(weight) else module

    def _layer_is_chosen(self, module: str) -> bool:
        layer = find_layer(module, self.layers_pattern)
        return layer is not None and layer in (self.layers_to_transform or frozenset())


def build_lora_config(document: JsonObject, *, what: str) -> LoraConfig:
    """Build a configuration from a document that is valid by its schema.

    Raises:
        InvalidPackageError: for a pattern key that is a regular expression.
    """
    values: dict[str, Any] = dict(document)
    layers = values.get("layers_to_transform")
    problems: list[str] = []
    modules, parameters = values.get("target_modules"), parse_target_parameters(values, problems)
    if not parameters and modules == []:
        problems.append("target_modules: it names none, and target_parameters neither")
    config = LoraConfig(
        r=int(values["r"]),
        alpha=values["lora_alpha"],
        use_rslora=values.get("use_rslora", False),
        use_dora=bool(values.get("use_dora")),
        fan_in_fan_out=values.get("fan_in_fan_out", False),
        target_modules=frozenset() if parameters and modules is None else parse_literals(modules),
        target_parameters=parameters,
        transposed=is_transposed(values, parameters, problems),
        exclude_modules=parse_literals(values.get("exclude_modules")) or frozenset(),
        rank_pattern=tuple(
            (pattern, int(rank))
            for pattern, rank in _parse_patterns(
                values.get("rank_pattern"), "rank_pattern", problems
            )
        ),
        alpha_pattern=_parse_patterns(values.get("alpha_pattern"), "alpha_pattern", problems),
        layers_to_transform=_to_layers(layers),
        layers_pattern=_to_texts(values.get("layers_pattern")),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
    if problems:
        raise InvalidPackageError(what, problems)
    return config


def find_layer(module: str, patterns: tuple[str, ...]) -> int | None:
    """Return the layer number in a module name: the first one, or the first after a pattern.

    Patterns are tried in order, by plain search, as both they and the name are untrusted.
    """
    before = [re.escape(pattern) for pattern in patterns] or [_DEFAULT_LAYER_PREFIX]
    found = (re.search(rf"\.{words}\.([0-9]+)\.", f".{module}") for words in before)
    return next((int(match[1]) for match in found if match), None)


def _escape_literal(part: str) -> str:
    """Unescape the dots of an alternative, except in `_ANY_PREFIX` before it."""
    rest = part.removeprefix(_ANY_PREFIX)
    return part[: len(part) - len(rest)] + rest.replace("\\.", ".")


def _ends_with(module: str, part: str) -> bool:
    """Match a literal at the end of a name, after its start or a dot; ``.`` is any character."""
    inside = part.startswith(_ANY_PREFIX)
    whole = part.removeprefix(_ANY_PREFIX if inside else "^")
    start = len(module) - len(whole)
    if start < inside or (start > 0 and (part.startswith("^") or module[start - 1] != ".")):
        return False
    end = module[start:]
    return whole == end or (
        "." in whole and all(a in (".", b) for a, b in zip(whole, end, strict=True))
    )


def _to_texts(value: list[str] | str | None) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value or ())


def _to_layers(value: list[int] | int | None) -> frozenset[int] | None:
    if isinstance(value, (int, float)):
        return frozenset({int(value)})
    return frozenset(int(layer) for layer in value) if value else None


def _parse_patterns(
    table: Mapping[str, Any] | None, field: str, problems: list[str]
) -> tuple[tuple[ModulePattern, Any], ...]:
    patterns = []
    for key, value in (table or {}).items():
        try:
            patterns.append((ModulePattern.parse(key), value))
        except ValueError as error:
            problems.append(f"{field}: {error}")
    return tuple(patterns)


@dataclass(frozen=True, slots=True)
class Ia3Config:
    """The configuration of an IA³ adapter."""

    target_modules: frozenset[str] | None
    """Literal module names; ``None`` for a pattern: then the tensors decide."""
    exclude_modules: frozenset[str]
    feedforward_modules: frozenset[str] | None
    """Like ``target_modules``: with ``None`` the shapes decide."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["ia3"]:
        """The kind of adapter."""
        return "ia3"

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can target a module, by PEFT's rules."""
        if matches_module(self.exclude_modules, module):
            return False
        return self.target_modules is None or matches_module(self.target_modules, module)

    def scales_input(self, module: str) -> bool | None:
        """Tell whether a module's inputs are scaled; ``None`` if its tensor must show it.

        Here PEFT accepts any suffix of a module's name, not only a dotted one. As both names are
        untrusted, suffixes are looked up, which takes the same time for any number of names.
        """
        names = self.feedforward_modules
        if names is None:
            return None
        return any(module[start:] in names for start in range(len(module)))


def build_ia3_config(document: JsonObject) -> Ia3Config:
    """Build a configuration from a document that is valid by its schema."""
    values: dict[str, Any] = dict(document)
    return Ia3Config(
        target_modules=parse_literals(values.get("target_modules")),
        exclude_modules=parse_literals(values.get("exclude_modules")) or frozenset(),
        feedforward_modules=parse_literals(values.get("feedforward_modules")),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )


@dataclass(frozen=True, slots=True)
class SoftPromptConfig:
    """The configuration of a soft prompt, from prompt tuning or P-tuning."""

    tokens: int
    width: int | None
    """``None`` if the configuration does not say: then the tensor decides."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["soft_prompt"]:
        """The kind of adapter."""
        return "soft_prompt"


def build_soft_prompt_config(document: JsonObject) -> SoftPromptConfig:
    """Build a configuration from a document that is valid by its schema."""
    values: dict[str, Any] = dict(document)
    width = values.get("token_dim")
    return SoftPromptConfig(
        tokens=int(values["num_virtual_tokens"]),
        width=None if width is None else int(width),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
