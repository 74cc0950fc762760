"""`ThinkingFilter`: separates thoughts, ``<think>`` to ``</think>``, from the answer.

Thoughts are returned, too, as parts of their own. White space inside a block, at both its ends,
belongs to the tags, and so does white space around a block that has no answer before it. A block
that is not closed ends with the text. How the text is cut into pieces does not matter, and no more
is held back than a tag and white space.
"""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"
MAX_SPACE = 1024
"""White space that is held back because a tag may follow; any more is text."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block is in the text: from its opening tag to after its closing tag."""

    begin: int
    end: int


Part = Answer | Thought


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends inside a block, so that the model goes on thinking at once."""
    return prompt.rstrip(_SPACE).endswith(OPEN)


def ends_thinking(text: str) -> bool:
    """Whether the beginning of an answer ends inside a block."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def unfinished_tag(text: str) -> str:
    """Return the end of the beginning of an answer that may be the first part of a tag."""
    count = _overlap(text, CLOSE if ends_thinking(text) else OPEN)
    return text[len(text) - count :]


class ThinkingFilter:
    """Splits one text into answer and thoughts."""

    def __init__(self, *, opened: bool = False, begun: str = "") -> None:
        """Begin in the answer, or inside a block that the prompt opened.

        ``begun`` is the first part of a tag with which the prompt ends; it is not given out.
        """
        self._thinking = opened
        self._held = begun
        self._silent = len(begun)
        """How much of what is held belongs to ``begun``."""
        self._space = ""
        self._fresh = opened
        """Whether white space that comes next belongs to the last tag."""
        self._answered = False

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return the parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while (at := self._held.find(self._tag)) >= 0:
            parts += self._give(self._take(at))
            self._take(len(self._tag))
            self._turn()
        certain = len(self._held) - _overlap(self._held, self._tag)
        parts += self._give(self._take(certain))
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back."""
        parts = self._give(self._take(len(self._held)))
        space, self._space = self._space, ""
        return parts if self._thinking or not space else [*parts, Answer(space)]

    @property
    def _tag(self) -> str:
        return CLOSE if self._thinking else OPEN

    def _turn(self) -> None:
        """Go past a tag, and drop the white space that was held back."""
        self._thinking, self._space = not self._thinking, ""
        self._fresh = self._thinking or not self._answered

    def _take(self, count: int) -> str:
        """Take so many characters from what is held; return those that are not of ``begun``."""
        text, self._held = self._held[self._silent : count], self._held[count:]
        self._silent = max(0, self._silent - count)
        return text

    def _give(self, text: str) -> list[Part]:
        """Return text as a part; hold back white space that may belong to a following tag."""
        text = self._space + text
        text = text.lstrip(_SPACE) if self._fresh else text
        certain = max(self._body(text), len(text) - MAX_SPACE)
        self._space, text = text[certain:], text[:certain]
        if not text:
            return []
        self._fresh = False
        self._answered = self._answered or not self._thinking
        return [Thought(text) if self._thinking else Answer(text)]

    def _body(self, text: str) -> int:
        """Return the length of the part that a following tag cannot take."""
        body = len(text.rstrip(_SPACE))
        return body if self._thinking or not (self._answered or body) else len(text)


def thoughts_of(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Split a whole text; return the answer and the thoughts."""
    parting = ThinkingFilter(opened=opened)
    parts = [*parting.push(text), *parting.finish()]
    answer = "".join(part.text for part in parts if isinstance(part, Answer))
    return answer, "".join(part.text for part in parts if isinstance(part, Thought))


def blocks_in(text: str, *, opened: bool = False) -> tuple[Block, ...]:
    """Return where the blocks of a whole text are, their tags included."""
    blocks, begin = list[Block](), 0 if opened else text.find(OPEN)
    while begin >= 0:
        close = text.find(CLOSE, begin)
        end = len(text) if close < 0 else close + len(CLOSE)
        blocks.append(Block(begin, end))
        begin = text.find(OPEN, end)
    return tuple(blocks)


def _overlap(text: str, tag: str) -> int:
    """Return how many letters at the end could be the beginning of a tag."""
    counts = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in counts if tag.startswith(text[-n:])), 0)
