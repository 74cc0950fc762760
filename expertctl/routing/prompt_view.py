"""The router's view of a prompt: what it asks, without what is addressed to the router itself.

Who writes into a prompt, or into a text that is pasted there, must not steer the choice: invisible
characters go, letters that only look like others are read as those, sentences that talk to the
router, name experts or pile up keywords are left out where something else remains. Only the router
sees this; the model is given the prompt as it was written.
"""

import re
from collections.abc import Iterable

from expertctl.routing.spelling import plain
from expertctl.routing.words import MAX_CHARACTERS

LEAST_WORDS = 2
"""A prompt of which fewer words would remain is looked at as it is."""

_SEGMENT = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_NAME = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*/[a-z0-9]+(?:[-_][a-z0-9]+)*(?:@[\w.^~*-]+)?")
_COMPOUND = re.compile(r"\b[a-z0-9]+(?:_[a-z0-9]+|(?:[-_][a-z0-9]+){2,})\b")
"""Names of one or two words are also words: a carry-on is luggage before it is an expert."""
_WORDS = re.compile(r"\w+")
_TRIGGER = re.compile(r"rout(?:er|ing|e)|expert|adapter|system|instruct|[/_\n<\[]|\w-\w", re.I)
_THING = r"(?:rout(?:er|ing)|experts?|adapters?|lora|plugin)"
_ADDRESSED = re.compile(
    rf"\b(?:ignore|disregard|bypass|override|forget|skip)\b.{{0,60}}\b{_THING}\b"
    rf"|\b(?:use|choose|select|pick|force|load|call|activate|prefer|take|run|invoke|switch to"
    rf"|route (?:this |it )?to|send (?:this |it )?to)\b.{{0,60}}\b{_THING}\b"
    rf"|\b{_THING}\b.{{0,30}}\b(?:must|should|shall|has to|is to|always)\b"
    r"|\b(?:ignore|disregard|forget|override)\b.{0,30}\b(?:previous|prior|above|all|earlier)\b"
    r".{0,20}\b(?:instructions?|rules?|prompts?)\b",
    re.IGNORECASE,
)


def mentionable(names: Iterable[str]) -> frozenset[str]:
    """Return what prompts may call packages: ``namespace/name``, and the name alone."""
    full = frozenset(names)
    return full | {name.partition("/")[2] for name in full}


def view(prompt: str, names: frozenset[str]) -> str:
    """Return what the router looks at; ``names`` are those of `mentionable`."""
    text = plain(prompt[:MAX_CHARACTERS])
    if not _TRIGGER.search(text):
        return text
    kept = [part for part in _SEGMENT.split(text) if part and not _is_addressed(part)]
    seen = " ".join(_without_names(part, names) for part in kept)
    return seen if len(_WORDS.findall(seen)) >= LEAST_WORDS else text


def _is_addressed(part: str) -> bool:
    return bool(_ADDRESSED.search(part))


def _without_names(part: str, names: frozenset[str]) -> str:
    """Leave out references to packages that are there."""
    return _COMPOUND.sub(
        lambda m: _unless_named(m, names), _NAME.sub(lambda m: _unless_named(m, names), part)
    )


def _unless_named(match: re.Match[str], names: frozenset[str]) -> str:
    name = match.group().partition("@")[0].replace("_", "-")
    return " " if name in names else match.group()
