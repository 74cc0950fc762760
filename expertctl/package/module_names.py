"""What the modules of a layer with routed experts are called: one name each, whatever files say.

Mixtral and the libraries that adapt it write ``block_sparse_moe.experts.3.w1`` for what is
``mlp.experts.3.gate_proj`` here, and some architectures ``mlp.shared_experts`` for
``mlp.shared_expert``.
"""

import re
from collections.abc import Container

_MODULE = re.compile(r"(?P<layer>model\.layers\.[0-9]+)\.(?:block_sparse_moe|mlp)\.(?P<rest>.+)")
_HALF = re.compile(r"(?P<expert>experts\.[0-9]+)\.(?P<half>w[123])(?P<end>\..*)?")
_HALVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_SHARED = re.compile(r"shared_experts(?=\.)")
_ROUTER = re.compile(r"(?P<layer>model\.layers\.[0-9]+)\.mlp\.gate")


def canonical_name(name: str) -> str:
    """Return our name of a module or of a tensor; most are named so already."""
    match = _MODULE.fullmatch(name)
    if match is None:
        return name
    rest = _SHARED.sub("shared_expert", match["rest"], count=1)
    half = _HALF.fullmatch(rest)
    if half is not None:
        rest = f"{half['expert']}.{_HALVES[half['half']]}{half['end'] or ''}"
    return f"{match['layer']}.mlp.{rest}"


def name_among(module: str, known: Container[str]) -> str:
    """Return what a base calls the module that an adapter changes; its own names go first."""
    return module if module in known else canonical_name(module)


def why_absent(module: str, known: Container[str]) -> str:
    """Say why an adapter may not change a module that is not among the layers of a base."""
    match = _ROUTER.fullmatch(canonical_name(module))
    if match is not None and f"{match['layer']}.mlp.experts.0.gate_proj" in known:
        return "it chooses the experts of its layer, and no adapter may change that"
    return "the base has no such linear layer"
