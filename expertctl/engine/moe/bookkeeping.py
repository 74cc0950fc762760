"""The bytes of what is known of routed experts: which have a slot, which were asked for, how often.

These are many small arrays and tables, each with its own owner. For a base of 48 layers with 128
experts, of which a token uses 8, they come to 12 MB, without the chances of which expert follows
which (`followers_bytes`). They grow with what passes ask for, so memory is set aside for all of
them at once; a test compares that with what is taken.
"""

from expertctl.engine.moe.followers import followers_bytes
from expertctl.package.experts_config import ExpertsConfig

_EACH = 512
"""For each expert: slot, place, worth and counts, also in passes not counted yet, and in habits.

The arrays take 160 of it.
"""
_EACH_WHOLE = 256
"""For each expert where all are in memory, and none has a slot."""
_CHOICE = 48
"""For each choice of a token in a layer: its id while it is kept, and what counting it takes."""
_TOKENS = 512
"""So many tokens are kept and counted at once."""


def bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes set aside where experts may be missing, without `followers_bytes`."""
    return _bytes(config, _EACH)


def whole_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes set aside where no expert is ever missing."""
    return _bytes(config, _EACH_WHOLE)


def known_bytes(config: ExpertsConfig) -> int:
    """Return the bytes of what is known where experts may be missing, with `followers_bytes`."""
    followers = followers_bytes(layers=len(config.layers), experts=config.count)
    return followers + bookkeeping_bytes(config)


def _bytes(config: ExpertsConfig, each: int) -> int:
    return len(config.layers) * (config.count * each + _TOKENS * config.used * _CHOICE)
