"""Fields of the published API that are not implemented here, and what becomes of them.

A neutral value asks for nothing and is accepted. Any other value of a field that only says how an
answer is stored, paid for or sent is ignored and reported; of a field that would change what the
answer is, it is refused. A server with strict fields refuses both.
"""

from collections.abc import Iterator, Mapping

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
_IGNORED = frozenset({"prediction", "service_tier", "store", "verbosity"})
_INSTEAD = {"function_call": "tool_choice", "functions": "tools"}


def check_neutral(fields: SharedFields, *, strict: bool = False) -> tuple[str, ...]:
    """Return the names of fields whose values are ignored; ``strict``: refuse them, too.

    Raises:
        FieldError: naming the first field that asks for what is not done here.
    """
    ignored = list[str]()
    for error in _not_done(fields):
        if strict or error.field not in _IGNORED:
            raise error
        ignored.append(error.field)
    for error in _stream_options_not_done(fields):
        if strict:
            raise error
        ignored.append(error.field)
    return tuple(ignored)


def _not_done(fields: SharedFields) -> Iterator[FieldError]:
    for name, values in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if not any(type(value) is type(one) and value == one for one in values):
            instead = _INSTEAD.get(name)
            hint = f"use {instead}" if instead else "leave it out"
            yield FieldError(f"{name}: this server does not do that", field=name, hint=hint)


def _stream_options_not_done(fields: SharedFields) -> Iterator[FieldError]:
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        yield FieldError(
            "stream_options: they are for streams only",
            field="stream_options",
            hint="give stream, too",
        )
    if options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        yield FieldError(f"{field}: this server does not do that", field=field)
