"""`ReasoningParser`: separates reasoning, ``<think>`` to ``</think>``, from the answer.

Reasoning is returned as parts of its own. White space at both ends of a block belongs to the tags,
and so does white space around a block before which there is no answer. An unclosed block ends with
the text. The parts do not depend on how the text is cut into pieces; no more is held back than a
tag and white space.

Reasoning tokens are counted as both published APIs count them, tags included: a token counts if its
text begins inside a block. Counting long reasoning would block the event loop, so it runs in a
thread.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertctl.engine.generation import GenerationOutput
from expertctl.engine.result import RunResult
from expertctl.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
MAX_SPACE = 1024
"""Maximum white space held back because a tag or marker may follow; any more is text."""
WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The range of a block in the text, from its opening tag to after its closing tag."""

    begin: int
    end: int


ReasoningPart = AnswerText | ReasoningText


def prompt_opens_reasoning(prompt: str) -> bool:
    """Tell whether a prompt ends inside a block, so that the answer begins with reasoning."""
    return prompt.rstrip(WHITE_SPACE).endswith(OPEN_TAG)


def ends_in_reasoning(text: str) -> bool:
    """Tell whether the beginning of an answer ends inside a block."""
    return text.rfind(OPEN_TAG) > text.rfind(CLOSE_TAG)


def find_partial_tag(text: str) -> str:
    """Return the longest suffix of an answer's beginning that may be the start of a tag."""
    count = count_overlap(text, CLOSE_TAG if ends_in_reasoning(text) else OPEN_TAG)
    return text[len(text) - count :]


class PendingText:
    """Text that a parser holds back; its first ``hidden`` characters are never returned."""

    def __init__(self, text: str = "") -> None:
        """Hold ``text``, hidden."""
        self.text, self.hidden = text, len(text)

    def take(self, count: int) -> str:
        """Remove ``count`` characters; return those that are not hidden."""
        text, self.text = self.text[self.hidden : count], self.text[count:]
        self.hidden = max(0, self.hidden - count)
        return text


def count_overlap(text: str, tag: str) -> int:
    """Return the number of characters at the end of a text that could begin a tag."""
    counts = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in counts if tag.startswith(text[-n:])), 0)


class ReasoningParser:
    """Splits one text into answer and reasoning."""

    def __init__(self, *, starts_in_reasoning: bool = False, partial_tag: str = "") -> None:
        """Start in the answer, or inside a block that the prompt opened.

        ``partial_tag`` is the first part of a tag at the end of the prompt; it is not returned.
        """
        self._is_reasoning = starts_in_reasoning
        self._held = PendingText(partial_tag)
        self._space = ""
        self._strips_space = starts_in_reasoning
        """Whether white space that follows belongs to the last tag."""
        self._answered = False

    def push(self, text: str) -> list[ReasoningPart]:
        """Add the next piece; return the parts that are now certain."""
        held, parts = self._held, list[ReasoningPart]()
        held.text += text
        while (at := held.text.find(self._next_tag)) >= 0:
            parts += self._emit(held.take(at))
            held.take(len(self._next_tag))
            self._pass_tag()
        certain = len(held.text) - count_overlap(held.text, self._next_tag)
        return [*parts, *self._emit(held.take(certain))]

    def finish(self) -> list[ReasoningPart]:
        """Return what was held back."""
        parts = self._emit(self._held.take(len(self._held.text)))
        space, self._space = self._space, ""
        return parts if self._is_reasoning or not space else [*parts, AnswerText(space)]

    @property
    def _next_tag(self) -> str:
        return CLOSE_TAG if self._is_reasoning else OPEN_TAG

    def _pass_tag(self) -> None:
        """Pass a tag and drop the white space held back before it."""
        self._is_reasoning, self._space = not self._is_reasoning, ""
        self._strips_space = self._is_reasoning or not self._answered

    def _emit(self, text: str) -> list[ReasoningPart]:
        """Return text as a part; hold back white space that may belong to the next tag."""
        text = self._space + text
        text = text.lstrip(WHITE_SPACE) if self._strips_space else text
        certain = max(self._certain_length(text), len(text) - MAX_SPACE)
        self._space, text = text[certain:], text[:certain]
        if not text:
            return []
        self._strips_space = False
        self._answered = self._answered or not self._is_reasoning
        return [ReasoningText(text) if self._is_reasoning else AnswerText(text)]

    def _certain_length(self, text: str) -> int:
        """Return the length of the text that cannot belong to a following tag."""
        body = len(text.rstrip(WHITE_SPACE))
        return body if self._is_reasoning or not (self._answered or body) else len(text)


def split_reasoning(text: str, *, starts_in_reasoning: bool = False) -> tuple[str, str]:
    """Split a whole text into answer and reasoning."""
    parting = ReasoningParser(starts_in_reasoning=starts_in_reasoning)
    parts = [*parting.push(text), *parting.finish()]
    answer = "".join(part.text for part in parts if isinstance(part, AnswerText))
    return answer, "".join(part.text for part in parts if isinstance(part, ReasoningText))


def find_reasoning_spans(
    text: str, *, starts_in_reasoning: bool = False
) -> tuple[ReasoningSpan, ...]:
    """Return the ranges of the blocks of a whole text, tags included."""
    blocks, begin = list[ReasoningSpan](), 0 if starts_in_reasoning else text.find(OPEN_TAG)
    while begin >= 0:
        close = text.find(CLOSE_TAG, begin)
        end = len(text) if close < 0 else close + len(CLOSE_TAG)
        blocks.append(ReasoningSpan(begin, end))
        begin = text.find(OPEN_TAG, end)
    return tuple(blocks)


_GeneratedSpans = tuple[GenerationOutput, Sequence[ReasoningSpan]]


async def count_reasoning_tokens(
    results: Iterable[RunResult], tokenizer: Tokenizer, *, starts_in_reasoning: bool
) -> int:
    """Count the reasoning tokens of all answers to a prompt."""
    answers = [result.generated for result in results]
    thinking = [
        (one, find_reasoning_spans(one.text, starts_in_reasoning=starts_in_reasoning))
        for one in answers
    ]
    if not any(blocks for _, blocks in thinking):
        return 0
    return await asyncio.to_thread(_count_all, thinking, tokenizer)


def _count_all(thinking: Iterable[_GeneratedSpans], tokenizer: Tokenizer) -> int:
    return sum(_count_inside(one.tokens, blocks, tokenizer) for one, blocks in thinking)


def _count_inside(
    tokens: Iterable[int], blocks: Sequence[ReasoningSpan], tokenizer: Tokenizer
) -> int:
    stream, at, count = IncrementalDetokenizer(tokenizer), 0, 0
    left = list(reversed(blocks))
    for token in tokens:
        while left and left[-1].end <= at:
            left.pop()
        if not left:
            break
        count += left[-1].begin <= at
        at += len(stream.push(token))
    return count
