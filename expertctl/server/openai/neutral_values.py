"""Neutral values of fields that the published API has and that are not implemented here."""

from collections.abc import Mapping

from expertctl.server.field_error import FieldError
from expertctl.server.openai.shared_fields import SharedFields

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None,),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_INSTEAD = {"function_call": "tool_choice", "functions": "tools"}


def check_neutral(fields: SharedFields) -> None:
    """Refuse fields that ask for what is not done here.

    Raises:
        FieldError: naming the first such field.
    """
    for name, values in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if not any(type(value) is type(one) and value == one for one in values):
            instead = _INSTEAD.get(name)
            hint = f"use {instead}" if instead else "leave it out"
            raise FieldError(f"{name}: this server does not do that", field=name, hint=hint)
    _check_stream_options(fields)


def _check_stream_options(fields: SharedFields) -> None:
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        raise FieldError(
            "stream_options: they are for streams only",
            field="stream_options",
            hint="give stream, too",
        )
    if options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise FieldError(f"{field}: this server does not do that", field=field)
