"""When Python collects garbage: seldom while a command imports modules, not at all at its end.

Importing torch makes hundreds of thousands of objects that stay, and each collection goes through
all of them. A process that only calls `expertctl.cli.app.run` keeps its own settings.
"""

import gc

_USUAL = gc.get_threshold()
_SELDOM = 50_000
"""New objects before a collection: enough for imports, few enough for long-running commands."""


def search_seldom() -> None:
    """Collect seldom while a command starts."""
    gc.set_threshold(_SELDOM)


def search_as_usual() -> None:
    """Collect as before `search_seldom`, but skip the present objects: modules stay."""
    if gc.get_threshold()[0] == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def search_no_more() -> None:
    """Collect no more at exit: the system frees the memory as a whole."""
    gc.disable()
    gc.freeze()
