"""The tensors of an IA³ adapter, one for each module: ``base_model.model.<module>.ia3_l``.

PEFT writes factors for outputs as [size, 1], for the inputs of feed-forward modules as [1, size].
"""

import re

from expertctl.package.adapter import PREFIX, Ia3, wrapped
from expertctl.package.ia3_config import Ia3Config
from expertctl.package.tensor_file import TensorTable

_VECTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.ia3_l")


def ia3_parts(config: Ia3Config, table: TensorTable, problems: list[str]) -> list[Ia3]:
    """Give each tensor its module; what is wrong goes to ``problems``."""
    modules: dict[str, str] = {}
    for name in table.tensors:
        match = None if wrapped(name) else _VECTOR.fullmatch(name)
        if match is None:
            problems.append(f"{name}: {_why_not(name)}")
        else:
            modules[match["module"]] = name
    parts = [_part(config, table, module, modules[module], problems) for module in sorted(modules)]
    return [part for part in parts if part is not None]


def _why_not(name: str) -> str:
    found = wrapped(name)
    if found is not None:
        return found
    if ".modules_to_save." in name:
        return "whole modules in an adapter are not supported"
    if not name.startswith(PREFIX):
        return f"an IA³ tensor of PEFT begins with {PREFIX!r}"
    return "not the name of an IA³ tensor, …ia3_l"


def _part(
    config: Ia3Config, table: TensorTable, module: str, name: str, problems: list[str]
) -> Ia3 | None:
    if not config.adapts(module):
        problems.append(f"{module}: the configuration does not target this module")
        return None
    shape = table.tensors[name].shape
    if len(shape) != 2 or 1 not in shape:
        problems.append(f"{module}: ia3_l {list(shape)} is neither [size, 1] nor [1, size]")
        return None
    on_input = config.on_input(module)
    if on_input is None and shape == (1, 1):
        problems.append(f"{module}: ia3_l [1, 1]: list feedforward_modules, else it is ambiguous")
        return None
    if on_input is None:
        on_input = shape[0] == 1
    if shape[0 if on_input else 1] != 1:
        side = "inputs, as [1, size]" if on_input else "outputs, as [size, 1]"
        problems.append(f"{module}: ia3_l {list(shape)}, the configuration scales {side}")
        return None
    return Ia3(module, name, on_input, shape[1] if on_input else shape[0])
