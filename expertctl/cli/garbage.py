"""When Python looks for garbage: seldom while a command imports modules, not at all at its end.

Importing torch makes hundreds of thousands of objects that stay, and each search goes through those
there are. A process that only calls `expertctl.cli.app.run` keeps its own habits.
"""

import gc

_USUAL = gc.get_threshold()
_SELDOM = 50_000
"""New objects before a search: enough to import with, few enough for what goes on for long."""


def search_seldom() -> None:
    """Let searches be rare while a command starts."""
    gc.set_threshold(_SELDOM)


def search_as_usual() -> None:
    """Search as before `search_seldom`, but never through what is there now: modules stay."""
    if gc.get_threshold()[0] == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def search_no_more() -> None:
    """Leave what is there to the system, which takes it back as a whole."""
    gc.disable()
    gc.freeze()
