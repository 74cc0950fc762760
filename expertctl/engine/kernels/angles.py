"""The rotations of the tokens of a run: cosines and sines of their positions.

They are worked out once a run, not kept by position: every layer uses the same.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.arguments import address, words_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import floats_at, longs_at, words

Numbers = np.ndarray[Any, Any]


@cache
def angles_kernel() -> Kernel:
    """Return the kernel; one item is one token."""
    return compile_kernel("angles", _angles)


def angles_arguments(
    *, positions: Numbers, frequencies: Numbers, factor: Numbers, out: Numbers
) -> Numbers:
    """Return its arguments: ``out`` float32 [tokens, 2, dim], cosines then sines.

    ``positions`` is int64 [tokens], ``frequencies`` float32 [dim / 2] as of `rope`; cosines and
    sines are repeated for both halves of a head and multiplied with ``factor``, float32 [1].
    """
    assert out.shape[1:] == (2, 2 * len(frequencies))
    return words_of(
        address(positions, np.int64),
        address(frequencies),
        len(frequencies),
        address(factor),
        address(out),
    )


def _angles(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    positions, frequencies, half, factors, out = words(arguments, 5)
    factor = floats_at(factors, 1)[0]
    for token in range(first, last):
        position = np.float32(longs_at(positions, token + 1)[token])
        row = floats_at(out + token * half * 16, 4 * half)
        for k in range(half):
            # The angle is rounded as transformers rounds it; its cosine is as good as exact.
            angle = np.float64(position * floats_at(frequencies, half)[k])
            cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            row[k] = row[half + k] = cosine * factor
            row[2 * half + k] = row[3 * half + k] = sine * factor
