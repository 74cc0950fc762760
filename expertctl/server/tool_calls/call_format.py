"""`CallFormat`: how the models of one family write a call of a tool.

The chat template shows the family: it writes earlier calls as the model learnt to write them.
Control tokens are not text (see `expertctl.engine.tokenizer`), so where a family marks a call by
one, the mark may be missing: then a call counts only at the very beginning of an answer, or
right after another call. In every family a call without a mark counts if it is the whole answer.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class Opening:
    """What stands before the JSON of a call."""

    text: str
    brackets: str
    """Brackets that the JSON may begin with; white space may come before."""
    tool: str | None = None
    """The tool, if the JSON holds its arguments alone."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls."""

    mark: str
    """Text that begins a call, wherever it stands."""
    brackets: str = "{"
    end: str = ""
    """Text that follows the JSON."""
    bare: bool = False
    """Whether the mark may be missing."""
    separator: str = ""
    """Characters that may stand between two calls."""
    named: str | None = None
    """Text between the name of a tool and its arguments; None: the name is in the JSON."""
    id_length: int | None = None
    """Letters and digits that the chat template demands in the id of a call; None: any."""

    def openings(self, tools: Iterable[str], *, bare: bool) -> Iterator[Opening]:
        """Yield all ways to begin a call of these tools, with or without the mark."""
        mark = "" if bare else self.mark
        yield Opening(mark, self.brackets)
        if self.named is None:
            return
        for tool in tools:
            yield Opening(f"{mark}{tool}{self.named}", "{", tool)
            yield Opening(f"{mark}{tool}", "{", tool)


HERMES = CallFormat("<tool_call>", end="</tool_call>")
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen, and many after them."""
LLAMA = CallFormat("<|python_tag|>", bare=True, separator=";")
"""``{"name": …, "parameters": {…}}`` as the answer: Llama 3.1 and later."""
MISTRAL = CallFormat("[TOOL_CALLS]", brackets="[{", bare=True, named="[ARGS]", id_length=9)
"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, later ``[TOOL_CALLS]name[ARGS]{…}``."""


def format_of(template: str) -> CallFormat:
    """Return the format that a chat template writes; Hermes if it writes none."""
    if HERMES.mark in template:
        return HERMES
    if MISTRAL.mark in template:
        return MISTRAL
    if LLAMA.mark in template or '"parameters": ' in template:
        return LLAMA
    return HERMES


def reads_tools(template: str) -> bool:
    """Whether a chat template reads tools; otherwise the model never sees them."""
    return _TOOLS.search(template) is not None
