"""The tensors of a LoRA or a DoRA: two halves for each module, and DoRA's magnitude.

Names are PEFT's: ``base_model.model.<module>.lora_A.weight``, ``…lora_B.weight``,
``…lora_magnitude_vector``. Those of stacks of experts are cut in `expertctl.package.stacked_parts`.
"""

import re
from collections.abc import Mapping

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import PREFIX, Dora, Lora, wrapped
from expertctl.package.lora_config import LoraConfig
from expertctl.package.stacked_parts import is_stack, stacked_parts
from expertctl.package.tensor_file import TensorInfo, TensorTable

_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_MAGNITUDE = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
_OTHERS = (
    (".lora_magnitude_vector", "it belongs to DoRA, and the configuration does not set use_dora"),
    (".lora_embedding_A", "LoRA on embeddings is not supported"),
    (".lora_embedding_B", "LoRA on embeddings is not supported"),
    (".modules_to_save.", "whole modules in an adapter are not supported"),
    (".ia3_l", "it belongs to IA³"),
    ("prompt_embeddings", "it belongs to a soft prompt"),
)
_NAMED_ADAPTER = re.compile(r"\.lora_[AB]\.[^.]+\.weight$")
_MAX_EFFORT = 100_000_000


def lora_parts(
    config: LoraConfig, table: TensorTable, problems: list[str], *, what: str
) -> list[Lora]:
    """Pair the tensors of a LoRA; what is wrong with them goes to ``problems``.

    Raises:
        InvalidPackageError: when reading would take too long.
    """
    strange: list[str] = []
    halves = _halves(table, strange)
    problems += [f"{name}: {_why_not(name)}" for name in strange]
    _check_effort(len(halves), config.pattern_size, what)
    stacks = {module: halves.pop(module) for module in sorted(halves) if is_stack(config, module)}
    parts = [_lora(config, table, module, halves[module], problems) for module in sorted(halves)]
    cut = stacked_parts(config, table, stacks, problems)
    return sorted([*(part for part in parts if part is not None), *cut], key=lambda p: p.module)


def dora_parts(
    config: LoraConfig, table: TensorTable, problems: list[str], *, what: str
) -> list[Dora]:
    """Find the three tensors of each module of a DoRA; see `lora_parts`.

    Raises:
        InvalidPackageError: when reading would take too long.
    """
    others: list[str] = []
    halves = _halves(table, others)
    magnitudes = _magnitudes(others, problems)
    _check_effort(len(halves), config.pattern_size, what)
    lonely = sorted(magnitudes.keys() - halves.keys())
    problems += [f"{module}: lora_A and lora_B are missing" for module in lonely]
    parts = []
    for module in sorted(halves):
        lora = _lora(config, table, module, halves[module], problems)
        part = _dora(lora, table, module, magnitudes.get(module), problems)
        parts += [part] if part else []
    return parts


def _halves(table: TensorTable, others: list[str]) -> dict[str, dict[str, str]]:
    """Return the halves of each module; the names of all other tensors go to ``others``."""
    halves: dict[str, dict[str, str]] = {}
    for name in table.tensors:
        match = None if wrapped(name) else _HALF.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            halves.setdefault(match["module"], {})[match["half"]] = name
    return halves


def _magnitudes(names: list[str], problems: list[str]) -> dict[str, str]:
    magnitudes: dict[str, str] = {}
    for name in names:
        match = _MAGNITUDE.fullmatch(name)
        if match is None:
            problems.append(f"{name}: {_why_not(name)}")
        elif magnitudes.setdefault(match["module"], name) != name:
            problems.append(f"{match['module']}: its magnitude is there twice")
    return magnitudes


def _check_effort(modules: int, pattern_size: int, what: str) -> None:
    """Every module is matched with every pattern, and both are untrusted."""
    if modules * pattern_size > _MAX_EFFORT:
        problem = f"{modules} modules are too many for such long patterns of rank and alpha"
        raise InvalidPackageError(what, [problem])


def _why_not(name: str) -> str:
    found = wrapped(name)
    if found is not None:
        return found
    for part, why in _OTHERS:
        if part in name:
            return why
    if not name.startswith(PREFIX):
        return f"a LoRA tensor of PEFT begins with {PREFIX!r}"
    if _NAMED_ADAPTER.search(name):
        return (
            "not the name of a LoRA tensor: the adapter's own name is part of it, so it was not "
            "saved with save_pretrained"
        )
    return "not the name of a LoRA tensor, …lora_A.weight or …lora_B.weight"


def _lora(
    config: LoraConfig,
    table: TensorTable,
    module: str,
    halves: Mapping[str, str],
    problems: list[str],
) -> Lora | None:
    if len(halves) != 2:
        absent = "B" if "A" in halves else "A"
        problems.append(f"{module}: lora_{absent} is missing")
        return None
    a, b = table.tensors[halves["A"]], table.tensors[halves["B"]]
    rank = config.rank_of(module)
    found = _shape_problems(module, a, b, rank)
    if not config.adapts(module):
        found.append(f"{module}: the configuration does not target this module")
    problems += found
    if found:
        return None
    scale = config.scale_of(module)
    return Lora(module, halves["A"], halves["B"], rank, scale, a.shape, b.shape)


def _shape_problems(module: str, a: TensorInfo, b: TensorInfo, rank: int) -> list[str]:
    if len(a.shape) != 2 or len(b.shape) != 2:
        return [f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not matrices"]
    if a.shape[0] != rank or b.shape[1] != rank:
        return [
            f"{module}: rank {a.shape[0]} in lora_A, {b.shape[1]} in lora_B, "
            f"{rank} in the configuration"
        ]
    return []


def _dora(
    lora: Lora | None, table: TensorTable, module: str, magnitude: str | None, problems: list[str]
) -> Dora | None:
    """Add the magnitude to the halves of a module."""
    if magnitude is None:
        problems.append(f"{module}: lora_magnitude_vector is missing, and use_dora demands it")
        return None
    if lora is None:
        return None
    shape = table.tensors[magnitude].shape
    if shape != (lora.outputs,):
        problems.append(
            f"{module}: lora_magnitude_vector {list(shape)} for {lora.outputs} outputs of lora_B"
        )
        return None
    return Dora(
        module, lora.a, lora.b, magnitude, lora.rank, lora.scale, lora.a_shape, lora.b_shape
    )
