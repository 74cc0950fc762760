"""How many earlier tokens each layer sees: the sliding windows of ``config.json``.

Keys that are absent mean what they mean to transformers; what it would fail on is refused.
"""

from collections.abc import Mapping

from expertctl.package.architectures import Window
from expertctl.package.config_fields import Fields

Windows = tuple[int | None, ...]
"""One for each layer; None: every earlier token is seen."""

_MAX_WINDOW = 1 << 24
_MAX_LAYER = 1 << 20
_USUAL_WINDOW = 4096


def parse_windows(fields: Fields, rule: Window, layers: int) -> Windows:
    """Return the window of each layer; what is wrong is noted in ``fields``."""
    match rule:
        case "none":
            return (None,) * layers
        case "every_layer":
            return _in_every_layer(fields, _window(fields, default=_USUAL_WINDOW), layers)
        case "every_layer_or_none":
            return _in_every_layer(fields, _window(fields, default=None), layers)
        case "every_layer_if_used":
            return _in_every_layer(fields, _window_if_used(fields), layers)
        case "late_layers":
            return _by_layer(fields, _window_if_used(fields), _late(fields, layers, first=28))
        case "late_layers_always":
            window = _window(fields, default=_USUAL_WINDOW)
            return _by_layer(fields, window, _late(fields, layers, first=62))
        case "even_layers":
            window = _window_if_used(fields)
            if window is None and fields.boolean("use_sliding_window", default=False):
                fields.refuse("sliding_window", "is null, but use_sliding_window is set")
            return _by_layer(fields, window, _even(fields, layers))


def _in_every_layer(fields: Fields, window: int | None, layers: int) -> Windows:
    if fields.get("layer_types") is not None:
        fields.refuse("layer_types", "is not supported for this architecture")
    return (window,) * layers


def _late(fields: Fields, layers: int, *, first: int) -> list[bool]:
    """Return which layers have a window if the file lists none: those from some layer on."""
    begin = fields.integer("max_window_layers", low=0, high=_MAX_LAYER, default=first)
    return [layer >= begin for layer in range(layers)]


def _even(fields: Fields, layers: int) -> list[bool]:
    end = fields.integer("max_window_layers", low=0, high=_MAX_LAYER, default=28)
    return [layer % 2 == 0 and layer < end for layer in range(layers)]


def _by_layer(fields: Fields, window: int | None, usual: list[bool]) -> Windows:
    layers = len(usual)
    if fields.get("layer_types") is None:
        return tuple(window if here else None for here in usual)
    kinds = fields.get("layer_types")
    known: Mapping[str, int | None] = {"full_attention": None, "sliding_attention": window}
    names = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    if len(names) != layers or not known.keys() >= set(names):
        fields.refuse("layer_types", f"must be {layers} times full_attention or sliding_attention")
        return (None,) * layers
    if window is None and "sliding_attention" in names:
        fields.refuse(
            "layer_types",
            "has sliding_attention, but use_sliding_window is not set, or sliding_window is null",
        )
    return tuple(known[name] for name in names)


def _window_if_used(fields: Fields) -> int | None:
    if not fields.boolean("use_sliding_window", default=False):
        return None
    return _window(fields, default=_USUAL_WINDOW)


def _window(fields: Fields, *, default: int | None) -> int | None:
    """An absent key means the default and null means none, as in transformers."""
    name = "sliding_window"
    if fields.is_null(name) or (default is None and fields.get(name) is None):
        return None
    return fields.integer(name, low=1, high=_MAX_WINDOW, default=default)
