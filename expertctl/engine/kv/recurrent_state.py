"""The state of a sequence in layers without keys and values, and which states are kept for others.

Keys and values can be cut at any token, a state cannot: it is that of all tokens so far. So a
sequence keeps some earlier states, and another one with the same prefix starts at the last of them
that lies within the common part. Kept are the state at every `choose_interval` tokens, at the last
page boundary before the end of the prompt, whose last token is always read, and at the end.

A state is float32 [layers, numbers] and never changed: a pass makes new ones. Memory is counted as
if all of a sequence existed from the start on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS
from expertctl.package.model_config import ModelConfig

State = np.ndarray[Any, Any]
_SHORTEST_INTERVAL = 64
_UNEVEN_STATES = 2
"""States of a sequence at no multiple of the interval: the current one, that of the prompt."""


def choose_interval(config: ModelConfig) -> int:
    """Return the tokens from one kept state to the next: so many that keys and values take more."""
    tokens = -(-config.state_bytes // max(config.count_kv_bytes(1, itemsize=4), 1))
    return max(_SHORTEST_INTERVAL, 1 << (tokens - 1).bit_length())


def estimate_state_bytes(config: ModelConfig, tokens: int, *, shared_tokens: int = 0) -> int:
    """Return the bytes of the states of so many tokens, whole pages; other owners have some."""
    if not config.state_bytes:
        return 0
    return config.state_bytes * (_UNEVEN_STATES + _count_even(config, tokens, shared_tokens))


def estimate_growth_bytes(config: ModelConfig, tokens: int, more: int) -> int:
    """Return the bytes by which states grow with ``more`` tokens after ``tokens``."""
    return config.state_bytes and config.state_bytes * _count_even(config, tokens + more, tokens)


def estimate_pass_state_bytes(config: ModelConfig) -> int:
    """Return the bytes of states that only a pass needs: those that it replaces, or may restore."""
    return (_UNEVEN_STATES + 1) * config.state_bytes


def _count_even(config: ModelConfig, tokens: int, first: int) -> int:
    interval = choose_interval(config)
    return tokens // interval - first // interval


class SequenceStates:
    """The current state of one sequence, and earlier ones by the number of their tokens."""

    def __init__(self, config: ModelConfig) -> None:
        """Start without tokens, for a base that has such layers."""
        assert config.delta_net is not None, "other layers have no state"
        self.shape = config.delta_net.state_shape
        self.current: State | None = None
        """None: that of no token."""
        self._config = config
        self._even: dict[int, State] = {}
        self._prompt: tuple[int, State] | None = None

    def list_positions(self, length: int, tokens: int) -> list[int]:
        """Return after how many tokens of the text a pass over ``tokens`` more makes a state."""
        end, interval = length + tokens, choose_interval(self._config)
        found = {end, *range(length // interval * interval + interval, end + 1, interval)}
        page = (end - 1) // KV_PAGE_TOKENS * KV_PAGE_TOKENS
        return sorted(found | ({page} if page > length and tokens > 1 else set()))

    def add(self, states: Mapping[int, State], *, is_prompt: bool) -> None:
        """Take the states that a pass has made; the last one is the current one."""
        interval = choose_interval(self._config)
        for position, state in states.items():
            self.current = state
            if position % interval == 0:
                self._even[position] = state
            if is_prompt and position % KV_PAGE_TOKENS == 0 and position < max(states):
                self._prompt = position, state

    def restore(self, length: int, state: State | None) -> None:
        """Return to a state that it had after fewer tokens."""
        self.current = state
        self._even = {n: kept for n, kept in self._even.items() if n <= length}
        if self._prompt is not None and self._prompt[0] > length:
            self._prompt = None

    def rewind(self, length: int) -> None:
        """Return to the state after so many tokens, which must be kept."""
        state = self._find(length)
        assert state is not None or length == 0, "a state cannot be cut"
        self.restore(length, state)

    def _find(self, length: int) -> State | None:
        """Return the state after so many tokens, if it is kept."""
        if self._prompt is not None and self._prompt[0] == length:
            return self._prompt[1]
        return self._even.get(length)

    def take_even(self, end: int) -> dict[int, State]:
        """Remove and return the states at multiples of the interval, as far as ``end``."""
        taken = {n: state for n, state in self._even.items() if n <= end}
        self._even = {n: state for n, state in self._even.items() if n > end}
        return taken

    def take_all(self, length: int) -> dict[int, State]:
        """Remove and return all states of a sequence of so many tokens."""
        taken = self.take_even(length)
        for position, state in self._list_uneven(length):
            taken[position] = state
        self.current, self._prompt = None, None
        return taken

    def check_integrity(self, length: int) -> None:
        """Assert that states are finite, have the right size, and are not ahead of the text."""
        assert (self.current is None) == (length == 0)
        uneven = dict(self._list_uneven(length))
        for position, state in (uneven | self._even).items():
            assert 0 < position <= length
            assert state.shape == self.shape
            assert np.isfinite(state).all()

    def _list_uneven(self, length: int) -> Iterable[tuple[int, State]]:
        found = [] if self._prompt is None else [self._prompt]
        return found if self.current is None else [*found, (length, self.current)]
