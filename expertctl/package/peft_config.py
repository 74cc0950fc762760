"""Which modules of a base an adapter's configuration names, as PEFT chooses its targets.

Which bare parameters of a base a LoRA changes: stacks of experts, and weights of linear layers.

In transformers 5 a layer keeps the matrices of its routed experts in two stacks. PEFT names them in
``target_parameters``, and lays the halves for all experts of a stack side by side in two tensors;
the schema lets no other parameters through. Which half is which depends on PEFT's version.

What the configuration of a LoRA or a DoRA decides about its tensors.

Foreign regular expressions are never run: the keys of ``rank_pattern`` and ``alpha_pattern`` are
literals for a linear matcher.

What the configuration of an IA³ adapter decides about its tensors.

What the configuration of a soft prompt, from prompt tuning or P-tuning, decides about it.

PEFT saves what the prompt encoder gave, so the settings of the encoder and of the initialisation
have no effect any more: they are labels, and the tokenizer that they name is never opened.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject


def parse_literals(value: Iterable[str] | str | None) -> frozenset[str] | None:
    """Return a list of module names; ``None`` for a pattern (never run) and for nothing."""
    return None if value is None or isinstance(value, str) else frozenset(value)


def matches_module(names: frozenset[str], module: str) -> bool:
    """Tell whether a module or a dotted end of it is among the names, however many they are."""
    while module not in names:
        _, dot, module = module.partition(".")
        if not dot:
            return False
    return True


STACKED_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stacks of a layer in their order, and the matrices of one expert in each, by rows."""
WEIGHT_PARAMETER = "weight"
"""What a linear layer calls its matrix."""
_RELEASE_PATTERN = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(?P<rest>.{0,90})", re.DOTALL
)
_TRANSPOSED_RELEASE = (0, 19, 1)
"""Before this version of PEFT, a stack [experts, out, in] was read as [experts, in, out]."""
_FIRST_RELEASE = (0, 18, 0)
"""Before this one, PEFT did not write its version."""


def parse_target_parameters(values: Mapping[str, Any], problems: list[str]) -> frozenset[str]:
    """Return the parameters that a configuration names; none where it names modules alone."""
    names = frozenset(values.get("target_parameters") or ())
    for field in ("use_dora", "fan_in_fan_out"):
        if names and values.get(field):
            problems.append(f"target_parameters: PEFT has no {field} for parameters")
    return names


def is_transposed(values: Mapping[str, Any], names: frozenset[str], problems: list[str]) -> bool:
    """Tell whether the halves of stacks have changed places, each transposed."""
    if not any(name.rpartition(".")[2] in STACKED_MODULES for name in names):
        return False
    version = values.get("peft_version")
    release = _RELEASE_PATTERN.match(version) if isinstance(version, str) else None
    found = tuple(map(int, release.groups()[:3])) if release else (0, 0, 0)
    unclear = release is not None and ("dev" in release["rest"] or "rc" in release["rest"])
    if found < _FIRST_RELEASE or (unclear and found <= _TRANSPOSED_RELEASE):
        problems.append(
            f"target_parameters: peft_version {str(version)[:40]!r} does not say which way round "
            "the halves of stacks lie; adapters that a release from 0.18.0 on saved do"
        )
    return found < _TRANSPOSED_RELEASE


_ANY_PREFIX = r".*\."
"""Begins an alternative that must follow something and a dot."""
_LITERAL = re.compile(rf"(\^|{re.escape(_ANY_PREFIX)})?[A-Za-z0-9_.-]+\$?")
_DEFAULT_LAYER_PREFIX = r"[^.]+\.[^.]+"
"""PEFT takes no number before the third place for a layer number."""
_COST_PER_NAME = 16


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """What one key of ``rank_pattern`` or ``alpha_pattern`` means: any of some module suffixes."""

    alternatives: tuple[str, ...]

    @classmethod
    def parse(cls, key: str) -> "ModulePattern":
        r"""Read ``name``, ``a.b``, ``^whole.name`` and ``a|b``; ``.`` stands for any character.

        So is ``.*\.name``, which PEFT writes for stacks of experts: it must follow something.

        Raises:
            ValueError: for any other regular expression.
        """
        alternatives = tuple(_escape_literal(part) for part in key.split("|"))
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
    transposed: bool
    """Whether the halves of stacks have changed places, each transposed."""
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
        """The highest cost of looking up one module: all characters, and a constant per name."""
        patterns = [p for p, _ in (*self.rank_pattern, *self.alpha_pattern)]
        return sum(
            _COST_PER_NAME + len(part) for pattern in patterns for part in pattern.alternatives
        )

    def rank_for(self, module: str) -> int:
        """Return the rank that the configuration gives a module, or a stack of experts."""
        name = self._pattern_key(module)
        return next((r for p, r in self.rank_pattern if p.matches(name)), self.r)

    def alpha_for(self, module: str) -> float:
        """Return the alpha that the configuration gives a module, or a stack of experts."""
        name = self._pattern_key(module)
        return next((a for p, a in self.alpha_pattern if p.matches(name)), self.alpha)

    def scale_for(self, module: str) -> float:
        """Return the factor on ``B A x``: alpha / r, or alpha / √r with rsLoRA."""
        rank = self.rank_for(module)
        return self.alpha_for(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, name: str) -> bool:
        """Tell whether the configuration names a parameter, as PEFT chooses them."""
        return matches_module(self.target_parameters, name)

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can mean a module, as PEFT chooses its targets."""
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
        """Return what patterns are matched with: the weight of a module, where that is a target."""
        weight = f"{module}.{WEIGHT_PARAMETER}"
        return weight if self.targets_parameter(weight) else module

    def _layer_is_chosen(self, module: str) -> bool:
        layer = find_layer(module, self.layers_pattern)
        return layer is not None and layer in (self.layers_to_transform or frozenset())


def build_lora_config(document: JsonObject, *, what: str) -> LoraConfig:
    """Return a configuration that the schema let through.

    Raises:
        InvalidPackageError: for a key of a pattern that is a regular expression.
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

    Patterns are tried in order, by plain search: both they and the name are untrusted.
    """
    before = [re.escape(pattern) for pattern in patterns] or [_DEFAULT_LAYER_PREFIX]
    found = (re.search(rf"\.{words}\.([0-9]+)\.", f".{module}") for words in before)
    return next((int(match[1]) for match in found if match), None)


def _escape_literal(part: str) -> str:
    """Return an alternative with its dots as they are, but for `_INSIDE` before it."""
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
    """Which modules get factors, and which of them on their inputs."""

    target_modules: frozenset[str] | None
    """Literal module names; ``None`` where a pattern was given: then the tensors decide."""
    exclude_modules: frozenset[str]
    feedforward_modules: frozenset[str] | None
    """As ``target_modules``: with ``None`` the shapes decide."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["ia3"]:
        """The kind of adapter."""
        return "ia3"

    def adapts(self, module: str) -> bool:
        """Tell whether the configuration can mean a module, as PEFT chooses its targets."""
        if matches_module(self.exclude_modules, module):
            return False
        return self.target_modules is None or matches_module(self.target_modules, module)

    def scales_input(self, module: str) -> bool | None:
        """Tell whether a module's inputs are scaled; ``None`` where its tensor must show it.

        PEFT takes any ending of a module's name here, not only a dotted one. Both names are
        untrusted, so the endings are looked up, which takes the same time for any number of names.
        """
        names = self.feedforward_modules
        if names is None:
            return None
        return any(module[start:] in names for start in range(len(module)))


def build_ia3_config(document: JsonObject) -> Ia3Config:
    """Return a configuration that the schema let through."""
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
    """How many virtual tokens there are, and how wide their embeddings."""

    tokens: int
    width: int | None
    """``None`` where the configuration does not say: then the tensor decides."""
    base_label: str | None
    """``base_model_name_or_path``: shown to people, never opened."""
    base_revision: str | None

    @property
    def kind(self) -> Literal["soft_prompt"]:
        """The kind of adapter."""
        return "soft_prompt"


def build_soft_prompt_config(document: JsonObject) -> SoftPromptConfig:
    """Return a configuration that the schema let through."""
    values: dict[str, Any] = dict(document)
    width = values.get("token_dim")
    return SoftPromptConfig(
        tokens=int(values["num_virtual_tokens"]),
        width=None if width is None else int(width),
        base_label=values.get("base_model_name_or_path"),
        base_revision=values.get("revision"),
    )
