"""What to do about how the router treats a package: for its publisher, and for who installs it."""

from collections.abc import Iterable

from expertctl.schema.manifest import Manifest
from expertctl.store.flags import GRAB_ALL, Flag

COPIED = frozenset({"copied", "near-copy"})
"""The flags of an expert that repeats another one."""
_FOR_PUBLISHERS = {
    "copied": "write texts of its own",
    "near-copy": "write examples of its own",
    GRAB_ALL: "keep to examples of one kind, and say in the description what they have in common",
    "stuffed": "keep to a few keywords that its other texts have, too",
    "names-another": "leave out the names of other packages",
    "repeated": "leave out what is repeated",
    "instructs": "say what it does, not what the router should do",
    "disguised": "write plain letters",
}


def without_examples(
    ref: str, *, named: str, add: str = "build it with some (`expertctl init DIR --examples FILE`)"
) -> str:
    """Say that an expert will hardly be chosen, and what helps."""
    return (
        f"{ref} has no routing.examples, so hardly any prompt will be routed to it: "
        f"{add}, or name it with {named}"
    )


def advice(manifest: Manifest, flags: Iterable[Flag]) -> list[str]:
    """Return what a publisher should change before others install a package, a line each."""
    return [
        f"{manifest.name} will be flagged where others install it ({flag.code}): {flag.sentence}; "
        f"{_FOR_PUBLISHERS[flag.code]}"
        for flag in dict.fromkeys(flags)
    ]


def ways_out(flags: Iterable[Flag], named: str) -> str:
    """Say what the router does with a flagged package of somebody else, and how to use it."""
    codes = {flag.code for flag in flags}
    does = "it loses ties"
    if codes & COPIED:
        does = "it does not answer where that package does"
    elif GRAB_ALL in codes:
        does = "it is asked last, until its publisher gives narrower examples"
    return f"{does}; {named} uses it"
