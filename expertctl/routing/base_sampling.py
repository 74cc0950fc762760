"""How the makers of a base want it sampled: the settings of its ``generation_config.json``.

Read are ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``; ``do_sample:
false`` is a temperature of 0. Null and a missing key leave a setting open. A value that cannot be
used is a warning, because the base runs without it; a file that cannot be read is an error. The
length of answers is not taken from there: that file limits it for other programs.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.errors import InvalidPackageError
from expertctl.routing.presets import LIMITS, is_within
from expertctl.schema.strict_json import read_bounded

GENERATION_CONFIG = "generation_config.json"
_MAX_BYTES = 1 << 20
_SHOWN = 40
_REALS = ("temperature", "top_p", "min_p", "repetition_penalty")
_WHOLE = ("top_k",)


@dataclass(frozen=True, slots=True)
class BaseSampling:
    """The sampling settings that a base comes with, and what could not be used of them."""

    given: Mapping[str, float]
    warnings: tuple[str, ...] = ()


def read_base_sampling(directory: Path) -> BaseSampling:
    """Read the sampling settings of the base in a folder; without the file there are none.

    Raises:
        InvalidPackageError: when the file is not a JSON object of a sane size.
    """
    document = _read(directory / GENERATION_CONFIG)
    given: dict[str, float] = {}
    warnings: list[str] = []
    for name in (*_REALS, *_WHOLE):
        value = document.get(name)
        if value is None:
            continue
        if _is_usable(name, value):
            given[name] = value if name in _WHOLE else float(value)
        else:
            warnings.append(f"{_bad_value(name, value)}; the setting is not used")
    if document.get("do_sample") is False:
        given["temperature"] = 0.0
    return BaseSampling(given, tuple(warnings))


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    data = read_bounded(path, max_bytes=_MAX_BYTES)
    if len(data) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {_MAX_BYTES} bytes"])
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise InvalidPackageError(str(path), ["the document is not a JSON object"])
    return document


def _is_usable(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name in _WHOLE:
        return isinstance(value, int) and is_within(name, value)
    return is_within(name, value) and math.isfinite(value)


def _bad_value(name: str, value: object) -> str:
    low, high = LIMITS[name]
    kind = "a whole number" if name in _WHOLE else "a number"
    said = ascii(value)
    shown = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
    allowed = f"{kind} from {low:g} to {high:g}"
    return f"{GENERATION_CONFIG} of the base: {name} ({shown}) is not {allowed}"
