"""The next turn of a conversation, with cached keys and values, and without them.

A chat with an expert, in a session: a long first turn, its answer, and a second turn. The second
turn is sent once more, word for word, in a new session, so that both process and generate the same
tokens and differ only in the cache. The order of the two alternates between rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Row, compare_times
from benchmarks.serving_load import ConversationTurn, StreamRecord, ask_one_by_one, make_prompt

TOKENS = 8
"""Tokens of each answer."""
NEXT_PROMPT = "And then?"


@dataclass(frozen=True, slots=True)
class TurnPair:
    """A second turn, in the session of the first and in a new one."""

    warm: StreamRecord
    cold: StreamRecord


def ask_twice(url: str, *, model: str, history: int, cold_first: bool) -> TurnPair:
    """Run a conversation, then its second turn again in a new session.

    Raises:
        SystemExit: as `check_session_reuse` does.
    """
    text = make_prompt(history)
    session, other = f"session {text[:6]}", f"stranger {text[:6]}"
    _, [first] = ask_one_by_one(url, [ConversationTurn(model, TOKENS, (text,), session)])
    said = (text, first.text, NEXT_PROMPT)
    order = (other, session) if cold_first else (session, other)
    _, told = ask_one_by_one(url, [ConversationTurn(model, TOKENS, said, name) for name in order])
    cold, warm = told if cold_first else reversed(told)
    check_session_reuse(first, TurnPair(warm, cold), history=history)
    return TurnPair(warm, cold)


def check_session_reuse(first: StreamRecord, turn: TurnPair, *, history: int) -> None:
    """Require that the first turn was found in the cache of its session, and nothing in a new one.

    Raises:
        SystemExit: when that is not so.
    """
    told = (first, turn.warm, turn.cold)
    if any(one.status != 200 or not one.times for one in told):
        raise SystemExit(f"serving: a turn was not answered: {[one.status for one in told]}")
    if first.cached or turn.cold.cached:
        raise SystemExit("serving: a new session reused KV of another")
    if turn.warm.cached < history:
        raise SystemExit(f"serving: of {history} tokens only {turn.warm.cached} were found again")


def make_conversation_row(turns: Sequence[TurnPair], *, history: int, target: str) -> Row:
    """Compare the times to the first token."""
    return compare_times(
        f"first token of a second chat turn after {history} tokens",
        [turn.warm.first for turn in turns],
        [turn.cold.first for turn in turns],
        steps=1,
        rival="of the same turn in a new session",
        target=target,
    )
