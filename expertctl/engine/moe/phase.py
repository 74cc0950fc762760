"""What a forward pass is for."""

from enum import StrEnum


class Phase(StrEnum):
    """Whether a pass reads a prompt or generates; also for each part of a prompt that is cut."""

    PROMPT = "prompt"
    DECODE = "decode"
