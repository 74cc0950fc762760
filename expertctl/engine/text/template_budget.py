"""Limits on chat templates: a `RenderBudget` of work per rendering, and maximum value sizes.

The sandbox replaces functions of Python and Jinja by the ones here, which check the cost before
they do the work. The limits are far above what a conversation needs.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

MAX_SIZE = 2_000_000  # characters of one value, including nested ones
MAX_WORK = 1_000_000
MAX_RANGE = 10_000
_MAX_BITS = 4096
_MAX_INDENT = 64
_MAX_STRIPPED = 256
_CHARACTERS_PER_UNIT = 32
_UNITS_PER_CALL = 10


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_METHODS: Mapping[type, frozenset[str]] = {
    str: split_words(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
        "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
        "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper"
    ),
    dict: split_words("get items keys values"),
    list: split_words("count index"),
    tuple: split_words("count index"),
}


class RenderBudget:
    """The remaining work of one rendering."""

    def __init__(self, work: int = MAX_WORK) -> None:
        """Start with ``work`` units of about a microsecond each."""
        self.left = work

    def spend(self, units: int) -> None:
        """Subtract work.

        Raises:
            SecurityError: if the budget is used up.
        """
        self.left -= 1 + units
        if self.left < 0:
            raise SecurityError("the template does more work than is allowed")


_BUDGET: ContextVar[RenderBudget] = ContextVar("budget")


@contextmanager
def use_budget(budget: RenderBudget) -> Iterator[None]:
    """Charge compiling and rendering within the context to ``budget``."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


def charge(*values: object) -> None:
    """Charge for processing values once."""
    _BUDGET.get().spend(sum(map(_estimate_weight, values)))


def charge_call(*values: object) -> None:
    """Charge for a call, which may be one of a macro, and for processing values once."""
    _BUDGET.get().spend(_UNITS_PER_CALL + sum(map(_estimate_weight, values)))


def estimate_size(value: object) -> int:
    """Return the approximate number of characters of a value when written out.

    Raises:
        SecurityError: if that is more than `MAX_SIZE`.
    """
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        size += len(item) + 2 if isinstance(item, str) else 4
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
        check_size(max(size, len(stack)))
    return size


def check_size(size: int) -> None:
    """Check the size of a value before it is created.

    Raises:
        SecurityError: if it is more than `MAX_SIZE`.
    """
    if size > MAX_SIZE:
        raise SecurityError("the template makes a value that is too large")


def charge_value(value: Any) -> Any:
    """Charge for a value, however deep, and return it."""
    if isinstance(value, list | tuple | dict):
        _BUDGET.get().spend(estimate_size(value) // _CHARACTERS_PER_UNIT)
    else:
        charge(value)
    return value


def charge_iteration(value: Any) -> Any:
    """Charge for every iteration of a loop before it starts."""
    if isinstance(value, Undefined) or not isinstance(value, Iterable):
        return value
    items: Any = value if hasattr(value, "__len__") else list(value)
    _BUDGET.get().spend(len(items))
    return items


def charge_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its arguments and its result are charged."""

    @wraps(function)  # keeps the attributes that tell Jinja which context to pass
    def pay(*args: Any, **kwargs: Any) -> Any:
        charge(*args, *kwargs.values())
        return charge_value(function(*args, **kwargs))

    return pay


def charge_call_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that does not look into its argument."""

    @wraps(function)
    def pay(*args: Any, **kwargs: Any) -> Any:
        charge()
        return function(*args, **kwargs)

    return pay


def stringify_output(value: Any) -> Any:
    """Charge for output, and convert it to text."""
    if isinstance(value, list | tuple | dict):
        estimate_size(value)
        value = str(value)
        _BUDGET.get().spend(len(value))
    charge(value)
    return value


def concatenate_output(parts: Iterable[str]) -> str:
    """Join output up to the maximum size."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        check_size(size)
        kept.append(part)
    return "".join(kept)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Check that the result of an operator has an acceptable size.

    Raises:
        SecurityError: if it has not.
    """
    match operator, left, right:
        case "%", str(), _:
            refuse_format()
        case "+", (str() | list() | tuple()), (str() | list() | tuple()):
            check_size(estimate_size(left) + estimate_size(right))
        case "*", (str() | list() | tuple()) as many, int(times):
            check_size(estimate_size(many) * max(times, 0))
        case "*", int(times), (str() | list() | tuple()) as many:
            check_size(estimate_size(many) * max(times, 0))
        case (("*" | "+"), int(), int()):
            _check_bits(left.bit_length() + right.bit_length())
        case "**", int(), int():
            _check_bits(left.bit_length() * abs(right))
        case _:
            pass


def safe_method(method: BuiltinFunctionType, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a method of a built-in type, or its limited replacement.

    Raises:
        SecurityError: if it is not on the allow-list.
    """
    owner, name = method.__self__, method.__name__
    if name not in _METHODS.get(type(owner), ()):
        raise SecurityError(f"{type(owner).__name__}.{name} is not available in chat templates")
    if isinstance(owner, str) and name == "join":
        return lambda items: join_filter(items, owner)
    if isinstance(owner, str) and name == "replace":
        return lambda old, new, count=-1: replace_filter(owner, old, new, count)
    if name.endswith("strip"):
        _check_stripped(*args)
    return method


def join_filter(value: Any, d: str = "", attribute: None = None) -> str:
    """Join texts, as Jinja's ``join`` does."""
    if attribute is not None:
        raise SecurityError("join by attribute is not available, use map before it")
    items = value if isinstance(value, list | tuple) else list(value)
    estimate_size(items)
    texts, between = [str(item) for item in items], str(d)
    check_size(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Replace in a text, as Jinja's ``replace`` does."""
    text, old, new = str(value), str(old), str(new)
    limit = -1 if count is None else count
    found = text.count(old) if limit < 0 else min(text.count(old), limit)
    check_size(len(text) + found * len(new))
    return text.replace(old, new, limit)


def trim_filter(value: Any, chars: str | None = None) -> str:
    """Strip a text, as Jinja's ``trim`` does."""
    _check_stripped(chars)
    return str(value).strip(chars)


def tojson_filter(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' ``tojson`` does: without HTML escapes."""
    estimate_size(value)
    _check_indent(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def indent_filter(value: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    """Indent the lines of a text, as Jinja's ``indent`` does."""
    _check_indent(width)
    text, space = str(value), " " * width
    check_size(len(text) + text.count("\n") * width)
    lines = text.split("\n")
    rest = [space + line if line or blank else line for line in lines[1:]]
    return "\n".join([(space if first else "") + lines[0], *rest])


def limited_range(*bounds: int) -> range:
    """Return a range of limited length."""
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"range() of more than {MAX_RANGE} numbers")
    return numbers


def limited_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dictionary of limited size."""
    made = dict(*args, **kwargs)
    estimate_size(made)
    return made


def refuse_format(*_: Any, **__: Any) -> str:
    """Refuse formatting, which could pad without limit."""
    raise SecurityError("string formatting is not available in chat templates, use ~ and filters")


def _estimate_weight(value: object) -> int:
    if isinstance(value, str):
        return len(value) // _CHARACTERS_PER_UNIT
    return len(value) if isinstance(value, list | tuple | dict) else 0


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError("the template makes a number that is too large")


def _check_stripped(chars: object = None, *_: object) -> None:
    if isinstance(chars, str) and len(chars) > _MAX_STRIPPED:
        raise SecurityError(f"stripping more than {_MAX_STRIPPED} different characters")


def _check_indent(indent: object) -> None:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT):
        raise SecurityError(f"an indent must be a number from 0 to {_MAX_INDENT}")
