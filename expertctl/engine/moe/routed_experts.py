"""The routed experts of a base, as a decoder sees them: where they are and how they are brought."""

from typing import Any, Protocol

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.phase import Phase

Numbers = np.ndarray[Any, Any]


class RoutedExperts(Protocol):
    """The owner of the experts of all layers; one pass at a time asks it.

    Routed layers are counted from 0, whatever their numbers in the base. Programs read the tables
    at each run, so these stay where they are.
    """

    @property
    def shape(self) -> ExpertShape:
        """What the block of an expert holds."""

    @property
    def is_whole(self) -> bool:
        """Whether no expert is ever missing."""

    @property
    def skips(self) -> bool:
        """Whether what is missing may be left out."""

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]; 0 for what is missing."""

    def hits(self, layer: int) -> Numbers:
        """Return float32 [experts], 1 for what is there and 0 for what is missing."""

    def ask(self, layer: int, room: Choices, tokens: int, *, foresees: bool = True) -> bool:
        """Ask for what tokens chose in a layer; tell whether experts have to be waited for.

        Meanwhile those that have a place may be computed. ``foresees``: the room says what the next
        layer is likely to be asked for. The last layer may be asked for fewer tokens than others.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """

    def wait_for_some(self) -> bool:
        """Wait for some of the experts that were asked for; tell whether others are still to come.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """

    def passed(self, room: Choices, tokens: int, *, phase: Phase) -> None:
        """Learn what was chosen in all layers of a pass that is over."""
