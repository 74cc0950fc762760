"""What the tokens of one pass chose, layer by layer, for the owner of the experts.

It stays until the next pass, so that it can be counted.
"""

from typing import Any, Protocol

import numpy as np

Numbers = np.ndarray[Any, Any]
NO_EXPERT = -1
"""Stands where a token asked for no expert; kernels write it where one is left out."""


class Choices(Protocol):
    """The choices of up to so many tokens; layers are routed ones, counted from 0."""

    selected: Numbers
    """The experts of each token, int64 [layers, tokens, used]; `NO_EXPERT` where it did not ask."""
    weights: Numbers
    """Their weights, float32 [layers, tokens, used]."""
    skipped: Numbers
    """How much of the weights of a token was left out, float32 [layers, tokens]."""
    likely: Numbers
    """What a layer will be asked for, as the one before it foresaw; nothing for the first."""


def end_asking(choices: Choices, first: int, tokens: int) -> None:
    """Let tokens from ``first`` up to ``tokens`` ask for no expert in the last layer."""
    choices.selected[-1, first:tokens] = NO_EXPERT
    choices.weights[-1, first:tokens] = 0
    choices.skipped[-1, first:tokens] = 0


class HostChoices:
    """Choices that were made on a device, in the memory of the machine."""

    def __init__(self, *, layers: int, tokens: int, used: int) -> None:
        """Make room for so many tokens."""
        self.selected = np.zeros((layers, tokens, used), np.int64)
        self.weights = np.zeros((layers, tokens, used), np.float32)
        self.skipped = np.zeros((layers, tokens), np.float32)
        self.likely = np.zeros((layers, tokens, used), np.int64)
        self.tokens = tokens
