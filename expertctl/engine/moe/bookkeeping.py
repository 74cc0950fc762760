"""What is known of routed experts, in bytes: who has a slot, who was asked for and how often.

These are many small arrays and tables, each with an owner of its own. Of a base of 48 layers with
128 experts, of which a token uses 8, they come to 12 MB beside the chances of who follows whom
(`followers_bytes`). They grow with what passes ask for, so memory is set aside for all of them at
once; a test holds that against what is taken.
"""

from expertctl.engine.moe.followers import followers_bytes
from expertctl.package.experts_config import ExpertsConfig

_EACH = 512
"""Of each expert: slot, place, worth and counts, in passes that are not counted yet, and in habits.

The arrays make 160 of it.
"""
_EACH_WHOLE = 256
"""Of each where all are in memory, and nobody has a slot."""
_CHOICE = 48
"""Of each choice of a token in a layer: its id while it is kept, and what counting it takes."""
_TOKENS = 512
"""So many tokens are kept and counted at once."""


def bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return what is set aside where experts may be missing, without who follows whom."""
    return _bytes(config, _EACH)


def whole_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return what is set aside where no expert is ever missing."""
    return _bytes(config, _EACH_WHOLE)


def known_bytes(config: ExpertsConfig) -> int:
    """Return all that is known where experts may be missing, who follows whom among it."""
    followers = followers_bytes(layers=len(config.layers), experts=config.count)
    return followers + bookkeeping_bytes(config)


def _bytes(config: ExpertsConfig, each: int) -> int:
    return len(config.layers) * (config.count * each + _TOKENS * config.used * _CHOICE)
