"""Where pieces of a copy lie, by its description, where each block is as long as in memory.

Small bases of routed experts that a machine knows, and their copies.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import ALIGNED, QuantisedLayout
from tests.factories import write_base

ENTRY_BYTES = 8 + 32
"""Of the table: how many bytes a piece has, and their sha256."""
END_BYTES = 3 * 8 + 32


def find_piece_offset(shape: QuantisedLayout, piece: int) -> int:
    """Return where a piece begins."""
    place = shape.memory_span(piece)
    if piece < shape.rest_pieces:
        return place.start
    return _padded_size(shape.rest_bytes) + (piece - shape.rest_pieces) * _padded_size(
        shape.block_bytes
    )


def find_table_offset(shape: QuantisedLayout) -> int:
    """Return where the table begins."""
    return (
        _padded_size(shape.rest_bytes) + shape.blocks * _padded_size(shape.block_bytes)
        if shape.blocks
        else shape.rest_bytes
    )


def compute_file_size(shape: QuantisedLayout) -> int:
    """Return how long the file is."""
    return find_table_offset(shape) + shape.pieces * ENTRY_BYTES + END_BYTES


def _padded_size(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


SIZES: dict[str, Any] = {"head_dim": 16, "hidden": 80, "tie": False, "layers": 3}


def write_routed_base(directory: Path, *, arch: str = "qwen3_moe", **config: Any) -> Path:
    """Write a base whose experts are published one by one."""
    inner = {"intermediate": 32} if arch == "mixtral" else {"moe_intermediate_size": 32}
    return write_base(directory, arch=arch, **{**SIZES, **inner, **config})


def write_stacked_base(directory: Path, **config: Any) -> Path:
    """Write the same base with the experts of a layer as one tensor."""
    write_routed_base(directory, **config)
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


def add_known_base(directory: Path, home: Path) -> QuantisedCache:
    """Add a base, and return the owner of its copies."""
    bases = BaseStore(home)
    return QuantisedCache(bases, bases.add(directory))


def open_stored_experts(directory: Path, scheme: Scheme) -> StoredExperts:
    """Return who reads the experts of a base from its files."""
    config = read_model_config(directory)
    return StoredExperts(read_base_tensors(directory, config), config, scheme)
