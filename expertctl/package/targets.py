"""Which modules of a base an adapter's configuration names, as PEFT chooses its targets."""

from collections.abc import Iterable


def literals(value: Iterable[str] | str | None) -> frozenset[str] | None:
    """Return a list of module names; ``None`` for a pattern (never run) and for nothing."""
    return None if value is None or isinstance(value, str) else frozenset(value)


def names_module(names: frozenset[str], module: str) -> bool:
    """Tell whether a module or a dotted end of it is among the names, however many they are."""
    while module not in names:
        _, dot, module = module.partition(".")
        if not dot:
            return False
    return True
