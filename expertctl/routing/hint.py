"""Whether a package's hint holds for a prompt."""

import operator as operators
from collections.abc import Callable, Mapping
from typing import Any

from expertctl.routing.features import Features
from expertctl.routing.words import contains
from expertctl.schema.hint import AllOf, AnyOf, Comparison, Hint, Keyword, Not

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}


def holds(hint: Hint, features: Features) -> bool:
    """Evaluate a hint on the features of a prompt; an unknown feature equals nothing."""
    match hint:
        case Keyword(words):
            return any(contains(features.words, word) for word in words)
        case Comparison(feature, operator, value):
            return _COMPARE[operator](getattr(features, feature), value)
        case Not(inner):
            return not holds(inner, features)
        case AllOf(hints):
            return all(holds(each, features) for each in hints)
        case AnyOf(hints):
            return any(holds(each, features) for each in hints)
