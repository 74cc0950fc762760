"""The router's view of a prompt: what it asks, without what is addressed to the router itself.

An order written into a prompt, or into a text pasted there, must not steer the choice. Invisible
characters are removed; letters that only look like others are read as those. Orders to the router,
names of experts, other roles, piles of keywords and what the request is about are left out where a
request remains. Only the router sees this; the model is given the prompt as it was written.
"""

import re
from collections.abc import Iterable

from expertctl.routing.addressed import is_order, without_labels, without_order, without_roles
from expertctl.routing.prompt_parts import (
    LONG,
    asking_paragraph,
    is_pile,
    request_of,
    sentences,
    shortened,
    without_lists,
    without_repeats,
)
from expertctl.routing.spelling import plain
from expertctl.routing.words import MAX_CHARACTERS

LEAST_WORDS = 2
"""A prompt of which fewer words would remain is read unchanged."""

_CALL = 3
"""Words that may call an expert by its name and say nothing else."""
_END = 2048
_REPEATED = 5
_COMMAS = 2
"""Up to this many commas do not make a list of keywords."""
_NAME = re.compile(
    r"(?<![a-z0-9_-])[a-z0-9]+(?:[-_][a-z0-9]+)*/[a-z0-9]+(?:[-_][a-z0-9]+)*(?:@[\w.^~*-]+)?"
)
_COMPOUND = re.compile(r"\b[a-z0-9]+(?:_[a-z0-9]+|(?:[-_][a-z0-9]+){2,})\b")
"""Names of one or two words are also words: a carry-on is luggage before it is an expert."""
_MARKS = ("\n", "(", "#", "@", "/", "_", "<", "[", "{", "|", "\u3002", "--")
_LABEL = re.compile(r"(?:words?|tags?|topics?|labels?|categor(?:y|ies)|subjects?|intents?)\s*[:=]")
_ASIDE = re.compile(r"[(\[{]\s*([a-z0-9]+(?:[-_][a-z0-9]+)*)\s*[)\]}]")
_BRACKETS = re.compile(r"[(\[{][\s,;]*[)\]}]")
_SPACES = re.compile(r"\s+")


def mentionable(names: Iterable[str]) -> frozenset[str]:
    """Return what prompts may call packages: ``namespace/name``, or the name alone."""
    full = frozenset(names)
    return full | {name.partition("/")[2] for name in full}


def view(prompt: str, names: frozenset[str]) -> str:
    """Return what the router reads of a prompt; ``names`` are those of `mentionable`."""
    text = plain(_ends(prompt))
    if _is_simple(text):
        return without_lists(text) if text.count(",") > _COMMAS else text
    request = without_repeats(asking_paragraph(request_of(without_roles(text).strip())))
    kept = [kept for part in sentences(request) if (kept := _for_the_model(part, names))]
    seen = _SPACES.sub(" ", " ".join(shortened(kept))).strip(" :,;-")
    return seen if seen.count(" ") + 1 >= LEAST_WORDS else text


def _ends(prompt: str) -> str:
    """Return the beginning and the end of a very long prompt: one of them holds the request."""
    if len(prompt) <= MAX_CHARACTERS:
        return prompt
    return f"{prompt[: MAX_CHARACTERS - _END]}\n\n{prompt[-_END:]}"


def _is_simple(text: str) -> bool:
    """Tell whether a text is plainly a request and nothing more."""
    spelled = text.casefold()
    words = spelled.split()
    return (
        len(words) <= LONG
        and len(words) - len(set(words)) < max(_REPEATED, len(words) // 4)
        and not any(mark in text for mark in _MARKS)
        and not (_LABEL.search(spelled) if ":" in text or "=" in text else None)
        and not is_order(text)
    )


def _for_the_model(sentence: str, names: frozenset[str]) -> str:
    """Return what a sentence says to the model; nothing where it only steers."""
    said = without_lists(without_order(without_labels(sentence)))
    unnamed = _BRACKETS.sub(" ", _without_names(said, names))
    few = unnamed != said and len(unnamed.split()) <= _CALL
    return "" if few or is_pile(unnamed) else unnamed


def _without_names(part: str, names: frozenset[str]) -> str:
    """Leave out references to known packages."""
    for pattern in (_NAME, _ASIDE, _COMPOUND):
        part = pattern.sub(lambda match: _unless_named(match, names), part)
    return part


def _unless_named(match: re.Match[str], names: frozenset[str]) -> str:
    name = match[match.lastindex or 0].partition("@")[0].replace("_", "-")
    return " " if name in names else match.group()
