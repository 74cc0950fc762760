"""Experts in bfloat16 made shorter without loss: every number stays as it was."""

from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, words_of
from expertctl.engine.kernels.compact import check_kernel, filled, most_bytes, pack_kernel
from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.kernels.lanes import VECTOR_BYTES
from expertctl.engine.kernels.routed_compact import stretches_of
from expertctl.engine.kernels.scheme import Scheme
from expertctl.store.copy_file import ALIGNED

Numbers = np.ndarray[Any, Any]


def compacted(block: Numbers, shape: ExpertShape) -> Numbers:
    """Return the compact bytes of an expert that lies in a block, uint8 [a multiple of 4096]."""
    sizes = stretches_of(shape)
    assert VECTOR_BYTES * sizes.prod(axis=1).sum() == block.nbytes
    offsets = 4 * (len(sizes) + 1)
    room = filled(offsets) + sum(most_bytes(*size) for size in sizes.tolist())
    packed = np.zeros(room + ALIGNED, np.uint8)
    arguments = words_of(
        address(block, np.uint8), address(sizes, np.int64), len(sizes), address(packed, np.uint8)
    )
    pack_kernel()(0, 1, address(arguments, np.int64))
    end = int(packed[:offsets].view(np.uint32)[-1])
    return packed[: -(-end // ALIGNED) * ALIGNED]


def least_bytes(shape: ExpertShape) -> int:
    """Return the bytes that any compact expert has: they say where its stretches begin."""
    return 4 * (len(stretches_of(shape)) + 1)


def can_be_compact(scheme: Scheme) -> bool:
    """Tell whether experts in a scheme are compact in the copy of a base."""
    return scheme is Scheme.BFLOAT16


def is_compact(block: Numbers, shape: ExpertShape) -> bool:
    """Tell whether an expert can be unpacked from a block; not whether it is the right one."""
    if block.nbytes < least_bytes(shape):
        return False
    sizes, found = stretches_of(shape), np.zeros(1, np.int64)
    arguments = words_of(
        address(block, np.uint8),
        block.nbytes,
        address(sizes, np.int64),
        len(sizes),
        address(found, np.int64),
    )
    check_kernel()(0, 1, address(arguments, np.int64))
    return bool(found[0])
