"""Small bases of routed experts that a machine knows, and their copies."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import read_config
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_copies import QuantisedCopies
from tests.factories import write_base

SIZES: dict[str, Any] = {"head_dim": 16, "hidden": 80, "tie": False, "layers": 3}


def routed_base(directory: Path, *, arch: str = "qwen3_moe", **config: Any) -> Path:
    """Write a base whose experts are published one by one."""
    inner = {"intermediate": 32} if arch == "mixtral" else {"moe_intermediate_size": 32}
    return write_base(directory, arch=arch, **{**SIZES, **inner, **config})


def stacked_base(directory: Path, **config: Any) -> Path:
    """Write the same base with the experts of a layer as one tensor."""
    routed_base(directory, **config)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    layers = {n.partition(".mlp.experts.")[0] for n in tensors if ".mlp.experts." in n}
    for layer in layers:
        at = f"{layer}.mlp.experts"
        count = sum(name.endswith(".down_proj.weight") for name in tensors if at in name)
        parts = [
            [tensors.pop(f"{at}.{number}.{name}_proj.weight") for number in range(count)]
            for name in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, parts)
        tensors[f"{at}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{at}.down_proj"] = down
    save_file(tensors, path)
    return directory


def known(directory: Path, home: Path) -> QuantisedCopies:
    """Add a base, and return the owner of its copies."""
    bases = BaseStore(home)
    return QuantisedCopies(bases, bases.add(directory))


def stored_experts(directory: Path, scheme: Scheme) -> StoredExperts:
    """Return who reads the experts of a base from its files."""
    config = read_config(directory)
    return StoredExperts(base_tensors(directory, config), config, scheme)
