"""Fill-in-the-middle: the tokens that a base was trained to have around a prefix and a suffix.

A base takes such prompts if its vocabulary has all tokens of a family below. The order is the one
that the family documents: prefix, suffix, middle, or for Mistral's bases the suffix first.
"""

from dataclasses import dataclass
from typing import Protocol


class _Vocabulary(Protocol):
    def token_id(self, token: str) -> int | None:
        """Return the number of a token by its spelling."""


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The tokens of one base; ``middle`` is None where nothing stands before the answer."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    """Tokens that end the middle, beside those that end every text of the base."""

    def arrange(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """Return the prompt whose continuation is the middle."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite, StableCode
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek-Coder's letters
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<fim_pad>",
    "<file_sep>",
    "<fim-pad>",
    "▁<EOT>",
    "<EOT>",
)
"""Padding of such prompts, and what stands between two files: behind it the middle is over."""


def find_fim_tokens(vocabulary: _Vocabulary) -> FimTokens | None:
    """Return the tokens of a base; None where it has none of these families."""
    for names in _FAMILIES:
        ids = [None if name is None else vocabulary.token_id(name) for name in names]
        if any(one is None for one, name in zip(ids, names, strict=True) if name is not None):
            continue
        prefix, suffix, middle = ids
        assert prefix is not None
        assert suffix is not None
        found = (vocabulary.token_id(name) for name in _ENDS)
        ends = {one for one in (*ids, *found) if one is not None}
        return FimTokens(prefix, suffix, middle, frozenset(ends))
    return None
