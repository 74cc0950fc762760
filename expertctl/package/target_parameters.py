"""Which bare parameters of a base a LoRA changes: stacks of experts, and weights of linear layers.

In transformers 5 a layer keeps the matrices of its routed experts in two stacks. PEFT names them in
``target_parameters``, and lays the halves for all experts of a stack side by side in two tensors;
the schema lets no other parameters through. Which half is which depends on PEFT's version.
"""

import re
from collections.abc import Mapping
from typing import Any

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stacks of a layer in their order, and the matrices of one expert in each, by rows."""
WEIGHT = "weight"
"""What a linear layer calls its matrix."""
_RELEASE = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(?P<rest>.{0,90})", re.DOTALL)
_TURNED = (0, 19, 1)
"""Before this version of PEFT, a stack [experts, out, in] was read as [experts, in, out]."""
_FIRST = (0, 18, 0)
"""Before this one, PEFT did not write its version."""


def target_parameters(values: Mapping[str, Any], problems: list[str]) -> frozenset[str]:
    """Return the parameters that a configuration names; none where it names modules alone."""
    names = frozenset(values.get("target_parameters") or ())
    for field in ("use_dora", "fan_in_fan_out"):
        if names and values.get(field):
            problems.append(f"target_parameters: PEFT has no {field} for parameters")
    return names


def is_turned(values: Mapping[str, Any], names: frozenset[str], problems: list[str]) -> bool:
    """Tell whether the halves of stacks have changed places, each transposed."""
    if not any(name.rpartition(".")[2] in STACKS for name in names):
        return False
    version = values.get("peft_version")
    release = _RELEASE.match(version) if isinstance(version, str) else None
    found = tuple(map(int, release.groups()[:3])) if release else (0, 0, 0)
    unclear = release is not None and ("dev" in release["rest"] or "rc" in release["rest"])
    if found < _FIRST or (unclear and found <= _TURNED):
        problems.append(
            f"target_parameters: peft_version {str(version)[:40]!r} does not say which way round "
            "the halves of stacks lie; adapters that a release from 0.18.0 on saved do"
        )
    return found < _TURNED
