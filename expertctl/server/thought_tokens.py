"""How many tokens of answers were thought, as both published APIs count them: with the tags.

A token counts if its text begins inside a block. Counting a long thought would block the event
loop, so it runs in a thread.
"""

import asyncio
from collections.abc import Iterable, Sequence

from expertctl.engine.generate import Generated
from expertctl.engine.run_result import RunResult
from expertctl.engine.tokenizer import TextStream, Tokenizer
from expertctl.server.thinking import Block, blocks_in

_Thinking = tuple[Generated, Sequence[Block]]


async def thought_tokens(
    results: Iterable[RunResult], tokenizer: Tokenizer, *, opened: bool
) -> int:
    """Return the count over all answers; ``opened``: their prompt ends inside a thought."""
    answers = [result.generated for result in results]
    thinking = [(one, blocks_in(one.text, opened=opened)) for one in answers]
    if not any(blocks for _, blocks in thinking):
        return 0
    return await asyncio.to_thread(_counted, thinking, tokenizer)


def _counted(thinking: Iterable[_Thinking], tokenizer: Tokenizer) -> int:
    return sum(_inside(one.tokens, blocks, tokenizer) for one, blocks in thinking)


def _inside(tokens: Iterable[int], blocks: Sequence[Block], tokenizer: Tokenizer) -> int:
    stream, at, count = TextStream(tokenizer), 0, 0
    left = list(reversed(blocks))
    for token in tokens:
        while left and left[-1].end <= at:
            left.pop()
        if not left:
            break
        count += left[-1].begin <= at
        at += len(stream.push(token))
    return count
