"""`BaseText`: properties of a base's text on which requests and answers depend.

They follow from the tokenizer and the chat template, which do not change while a base is served:
how the base writes calls of tools, whether it begins to think at once, how many tokens a
conversation has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from expertctl.engine.chat_template import ChatTemplate, encode_chat
from expertctl.engine.message import ChatEnd, Message
from expertctl.engine.tokenizer import Tokenizer
from expertctl.engine.tokenizer_config import TemplateSource
from expertctl.errors import ExpertError
from expertctl.schema.strict_json import JsonValue, canonical
from expertctl.server.thinking import OPEN, opens_thinking
from expertctl.server.tool_calls.call_format import CallFormat, format_of, reads_tools

_ANY_TURN = (Message("user", "?"),)
"""A stand-in conversation: how a template begins an answer does not depend on what was said."""
_NOT_ASKED = frozenset({"tools", "documents"})
_KEPT = 64


@dataclass(frozen=True)
class BaseText:
    """The text properties of one base; any thread may use them."""

    tokenizer: Tokenizer

    @property
    def form(self) -> CallFormat:
        """How the base writes calls of tools."""
        return format_of(self._template)

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template reads tools at all."""
        return reads_tools(self._template)

    @property
    def thinks(self) -> bool:
        """Whether the base may think before it answers: its template or tokens have the tag."""
        return OPEN in self._template or self.tokenizer.token_id(OPEN) is not None

    def opens_thinking(self, variables: Mapping[str, JsonValue]) -> bool:
        """Whether a prompt ends inside a thought, with these variables of the chat template."""
        source = self.tokenizer.config.template
        if source is None:
            return False
        names = tuple(self.tokenizer.config.special_tokens.items())
        asked = {name: value for name, value in variables.items() if name not in _NOT_ASKED}
        return _opens(source, names, _Variables(canonical(asked), asked))

    def count(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, JsonValue],
        *,
        end: ChatEnd = "new_turn",
    ) -> int:
        """Return how many tokens the base reads for a conversation; counting takes a while.

        Raises:
            ExpertError: when the conversation cannot be read.
        """
        return len(encode_chat(self.tokenizer, messages, variables=variables, end=end).ids)

    @property
    def _template(self) -> str:
        source = self.tokenizer.config.template
        return "" if source is None else source.text


class _Variables:
    """Variables that are compared by their JSON."""

    def __init__(self, key: bytes, values: Mapping[str, JsonValue]) -> None:
        self.key, self.values = key, values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Variables) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=_KEPT)
def _opens(
    source: TemplateSource, special_tokens: tuple[tuple[str, str], ...], given: _Variables
) -> bool:
    """Return False if the template fails: it fails for the request, too, which reports it."""
    try:
        prompt = ChatTemplate(source).render(
            _ANY_TURN, special_tokens=dict(special_tokens), variables=given.values
        )
    except ExpertError:
        return False
    return opens_thinking(prompt)
