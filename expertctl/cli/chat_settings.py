"""Sampling settings that ``/set`` changes in a chat, with the names of the options of ``run``."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from expertctl.errors import UsageError
from expertctl.user_request import SamplingOverrides

_SWITCH = {
    **dict.fromkeys(("yes", "true", "1"), True),
    **dict.fromkeys(("no", "false", "0"), False),
}
_KINDS = {"greedy": "yes or no", **dict.fromkeys(("top_k", "max_tokens", "seed"), "a whole number")}
_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "max_tokens", "seed"), int),
    "greedy": lambda text: _SWITCH[text.lower()],
    "stop": lambda text: tuple(json.loads(f"[{text}]")) if text.startswith('"') else (text,),
}
SETTINGS = tuple(_PARSERS)
_UNSET = "default"


def change_sampling(
    sampling: SamplingOverrides, seed: int | None, name: str, text: str
) -> tuple[SamplingOverrides, int | None]:
    """Return sampling settings and seed after one of them was set; ``default`` takes one back.

    A temperature switches greedy decoding off, and greedy decoding takes a temperature back.

    Raises:
        UsageError: for an unknown name, or a text that is no value of it.
    """
    if name not in _PARSERS:
        hint = f"{', '.join(SETTINGS)}; `/set NAME {_UNSET}` takes one back"
        raise UsageError(f"{name[:40]!r} is not a setting of a chat", hint=hint)
    if not text:
        raise UsageError(f"{name} needs a value", hint=f"/set {name} VALUE, or {_UNSET}")
    try:
        value = None if text == _UNSET else _PARSERS[name](text)
    except (ValueError, KeyError):
        kind = "a text" if name == "stop" else _KINDS.get(name, "a number")
        message = f"{name}: {text[:40]!r} is not {kind}"
        raise UsageError(message, hint=f"/set {name} VALUE, or {_UNSET}") from None
    if name == "seed":
        return sampling, value
    if name == "greedy":
        temperature = None if value else sampling.temperature
        return replace(sampling, greedy=bool(value), temperature=temperature), seed
    given: dict[str, Any] = {name: value}
    changed = replace(sampling, **given)
    return (replace(changed, greedy=False) if name == "temperature" and value else changed), seed


def format_sampling(sampling: SamplingOverrides, seed: int | None) -> str:
    """Return the settings that were set, as they can be set."""
    values = {name: getattr(sampling, name, None) for name in SETTINGS} | {"seed": seed}
    values["greedy"] = sampling.greedy or None
    given = {name: value for name, value in values.items() if value is not None}
    shown = (f"{name} {_format_value(value)}" for name, value in given.items())
    return "; ".join(shown) or "nothing is set: experts and base decide"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(json.dumps, value))
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
