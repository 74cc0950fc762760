"""Values of command line parameters, converted without pydantic where that changes nothing.

typer builds a pydantic adapter for each parameter of a command, whether the user gave the parameter
or not: a tenth of a second in a command with forty options, most of it to import pydantic.
`convert_lazily` puts a `LazyConversion` in front of each adapter: what needs no conversion, or only
that of a word to a whole number, is answered here, and typer's adapter is built for anything else,
so that values and error messages are typer's own.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,15}", re.ASCII)
_OPEN: Any = object()
"""A value that typer must convert."""


class LazyConversion:
    """Converts the values of one parameter, and builds typer's adapter when it must."""

    def __init__(self, descriptor: Any) -> None:
        """Convert values to the annotation of a `TypeDescriptor` of typer."""
        self._descriptor = descriptor
        self._adapter: Any = None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of a parameter as typer does, with typer's errors."""
        converted = self._convert_parameter(value, several=param.multiple or param.nargs == -1)
        if converted is not _OPEN:
            return converted
        if self._adapter is None:
            from typer._coercion import build_runtime_param

            self._adapter = build_runtime_param(self._descriptor)
        return self._adapter.coerce(value, param=param, ctx=ctx)

    def _convert_parameter(self, value: Any, *, several: bool) -> Any:
        if value is None:
            return () if several else None
        information = self._descriptor.parameter_info
        if information.parser is not None or information.clamp:
            return _OPEN
        annotation = self._descriptor.annotation
        if get_origin(annotation) is not list:
            return _OPEN if several else _convert(value, annotation, information)
        if not isinstance(value, list | tuple):
            return _OPEN
        values = [_convert(item, get_args(annotation)[0], information) for item in value]
        return _OPEN if any(item is _OPEN for item in values) else values


def convert_lazily(parameters: Iterable[Any]) -> None:
    """Convert the values of typer's parameters lazily; others are left as they are."""
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", _OPEN) is None:
            parameter._runtime_param = LazyConversion(parameter.type_descriptor)


def _convert(value: Any, annotation: Any, information: Any) -> Any:
    """Return the converted value, or `_OPEN`."""
    kind = type(value)
    if annotation is Path:
        return _convert_path(value, information) if kind is str else _OPEN
    if annotation is str:
        return value if kind is str else _OPEN
    if get_origin(annotation) is Literal:
        same = kind is str and information.case_sensitive and value in get_args(annotation)
        return value if same else _OPEN
    if annotation is int and kind is str and _WHOLE_NUMBER.fullmatch(value):
        value = int(value)
    elif annotation not in (int, float, bool) or kind is not annotation:
        return _OPEN
    low, high = information.min, information.max
    inside = (low is None or value >= low) and (high is None or value <= high)
    return value if inside else _OPEN


def _convert_path(value: str, information: Any) -> Any:
    from typer._click.exceptions import BadParameter
    from typer._param_types import coerce_cli_path

    if information.path_type is not None:
        return _OPEN
    try:
        return coerce_cli_path(Path(value), information, path_type=Path)
    except (BadParameter, ValueError):
        return _OPEN
