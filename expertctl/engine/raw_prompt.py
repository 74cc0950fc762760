"""The tokens of a `RawPrompt`, which is continued as it stands: no chat template reads it.

Control tokens that a text spells are control tokens unless ``parse_special`` is off. Tokens are
taken as they are. The tokenizer's token at the beginning of a text is added once: not to tokens,
and not to a text that spells it already.
"""

from expertctl.engine.chat_template import Prompt
from expertctl.engine.fim import find_fim_tokens
from expertctl.engine.message import RawPrompt
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import UsageError


def encode_raw(tokenizer: Tokenizer, raw: RawPrompt) -> Prompt:
    """Return the tokens of a prompt.

    Raises:
        UsageError: when it has none, or has a suffix and the base knows no fill-in-the-middle.
    """
    if raw.suffix is not None:
        return _encode_fim(tokenizer, raw, raw.suffix)
    ids = raw.ids
    if ids is None:
        encoded = tokenizer.encode_raw(
            raw.text,
            parse_special=raw.parse_special,
            add_special_tokens=raw.add_special_tokens,
        )
        ids = tuple(encoded)
    if not ids:
        raise UsageError("the prompt is empty", hint="send at least one token")
    return Prompt(raw.text, ids)


def _encode_fim(tokenizer: Tokenizer, raw: RawPrompt, suffix: str) -> Prompt:
    tokens = find_fim_tokens(tokenizer)
    if tokens is None:
        raise UsageError(
            "suffix: the base has no fill-in-the-middle tokens",
            hint="leave out suffix, or serve a base that was trained for it, such as Qwen2.5-Coder",
        )
    parse = raw.parse_special
    before = tokenizer.encode_part(raw.text, parse_special=parse, is_first=True)
    after = tokenizer.encode_part(suffix, parse_special=parse, is_first=False)
    begin = tokenizer.begin_ids if raw.add_special_tokens else ()
    return Prompt(raw.text, (*begin, *tokens.arrange(before, after)), end_ids=tokens.ends)
