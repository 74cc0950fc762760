"""Encoding and decoding text with the ``tokenizer.json`` of a base.

Control tokens are those that the file marks as special. User text never becomes one: if it spells
one, it is encoded as letters. Control tokens written by a chat template do become control tokens;
`ControlTokenMarks` separate the two in one rendered text. All other text is tokenised exactly as
the file says. A raw prompt, which uses no template, may spell control tokens itself.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from expertctl.engine.text.tokenizer_files import (
    TokenizerConfig,
    decode_token_bytes,
    read_tokenizer_config,
)
from expertctl.errors import InvalidPackageError, NotFoundError, UsageError

TOKENIZER_FILE = "tokenizer.json"
_MAX_BYTES = 128 << 20
_FIRST_MARK = 0xF0000  # private use plane
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_PENDING_TOKENS = 64
_ANCHOR = "\n"
_ANY_LETTER = "a"


@dataclass(frozen=True, slots=True)
class ControlTokenMarks:
    """Two characters that occur nowhere in a conversation, used to enclose control tokens in it."""

    begin: str
    end: str

    def wrap(self, text: str) -> str:
        """Enclose a text in marks."""
        return f"{self.begin}{text}{self.end}"

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered text into (piece, was marked); an unpaired mark also splits."""
        begin, end = self.begin, self.end
        for match in re.finditer(f"{begin}([^{begin}{end}]*){end}|([^{begin}{end}]+)", text):
            if match[1] or match[2]:
                yield (match[1], True) if match[1] else (match[2], False)


class Tokenizer:
    """The tokenizer of one base."""

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        """Keep the backend; users cannot write ``control_ids``, a subset of ``added_ids``."""
        self.config = config
        self._backend = backend
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        control = {i: token for i, token in added.items() if token.special}
        self.control_ids = frozenset(control)
        self._suspect = _control_token_pattern(control.values())
        self.end_ids = self._find_end_ids()

    @cached_property
    def size(self) -> int:
        """One more than the largest token id; reads the whole vocabulary."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the tokenizer of a base.

        Raises:
            NotFoundError: if there is none.
            InvalidPackageError: if a file is malformed.
        """
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise NotFoundError(f"{path} is missing", hint="the base must have a tokenizer.json")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise InvalidPackageError(str(path), [f"{size} bytes, at most {_MAX_BYTES} allowed"])
        with _wrap_library_errors(str(path), "not a tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()  # a prompt is never cut silently
        backend.no_padding()
        return cls(backend, read_tokenizer_config(directory))

    def encode(self, text: str) -> list[int]:
        """Encode user text; the file determines whether a token is added at the beginning.

        Raises:
            UsageError: if control tokens in the text cannot be encoded as letters, or if it has
                an unpaired surrogate.
        """
        _check_unicode(text)
        if not self._find_control_tokens(text):
            return _encode_ids(self._backend, text)
        self._encode_as_letters(text, after="")
        return _encode_ids(self._letter_backend, text)

    def encode_raw(self, text: str, *, parse_special: bool, add_special_tokens: bool) -> list[int]:
        """Encode a text that may spell control tokens if ``parse_special``, otherwise as letters.

        With ``add_special_tokens`` the file determines whether a token is added at the beginning; a
        text that already starts with it does not get it twice.

        Raises:
            UsageError: as in `encode`.
        """
        if not parse_special and add_special_tokens:
            return self.encode(text)
        ids = self.encode_piece(text, parse_special=parse_special, is_first=True)
        begin = list(self.begin_ids)
        if not add_special_tokens or (begin and ids[: len(begin)] == begin):
            return ids
        return _encode_ids(self._backend, text)

    def encode_piece(self, text: str, *, parse_special: bool, is_first: bool) -> list[int]:
        """Encode part of a text without additions; only the first part may get a space before it.

        Raises:
            UsageError: as in `encode`.
        """
        _check_unicode(text)
        after = "" if is_first or self._has_no_prefix_space else _ANCHOR
        if parse_special or not self._find_control_tokens(text):
            return self._encode_plain(text, after=after)
        return self._encode_as_letters(text, after=after)

    def encode_rendered(self, text: str, marks: ControlTokenMarks | None = None) -> list[int]:
        """Encode the output of a chat template without additions; marked parts become letters.

        Raises:
            UsageError: if a marked part cannot be encoded as letters.
        """
        if marks is None:
            return _encode_ids(self._backend, text, add_special_tokens=False)
        ids: list[int] = []
        for number, (piece, marked) in enumerate(marks.split(text)):
            encode = self._encode_as_letters if marked else self._encode_plain
            ids += encode(piece, after=_ANCHOR if number else "")
        return ids

    def choose_marks(self, texts: Sequence[str], *, template: str = "") -> ControlTokenMarks | None:
        """Return marks for a conversation that spells control tokens, else None.

        Raises:
            UsageError: if a text has an unpaired surrogate.
        """
        for text in texts:
            _check_unicode(text)
        if not any(self._find_control_tokens(text) for text in texts):
            return None
        used = set(template).union(*texts)
        free = (chr(c) for c in range(_FIRST_MARK, _FIRST_MARK + 65_534) if chr(c) not in used)
        return ControlTokenMarks(next(free), next(free))

    def mark_control_tokens(self, text: str, marks: ControlTokenMarks) -> str:
        """Return user text with marks around every control token in it."""
        parts, position = [], 0
        for begin, end in self._find_control_tokens(text):
            parts += [text[position:begin], marks.wrap(text[begin:end])]
            position = end
        return "".join((*parts, text[position:]))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, without control tokens, invalid UTF-8 as U+FFFD."""
        return _decode_ids(self._backend, ids, skip_special_tokens=True)

    def decode_raw(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, with control tokens spelled out."""
        return _decode_ids(self._backend, ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        r"""Return a single token as text: control tokens by name, parts of characters as bytes.

        These are ``bytes:`` and escapes such as ``\xe2\x80``, as in OpenAI's API.
        """
        if token in self.added_ids:
            return str(self._backend.id_to_token(token))
        raw = self.token_bytes(token)
        if raw is None:
            return self.decode([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token adds to a text; None if they are unknown."""
        piece: str | None = self._backend.id_to_token(token)
        if piece is not None and token not in self.added_ids:
            spelt = decode_token_bytes(piece, self._decoder_json)
            if spelt is not None:
                return spelt
        first, both = self.decode([token]), self.decode([token, token])
        text = both.removeprefix(first)  # some tokens lose a space at the beginning of a text
        return None if _REPLACEMENT_CHARACTER in both else text.encode()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def has_text(self, token: int) -> bool:
        """Return whether a token is in the vocabulary and not a control token."""
        return token not in self.control_ids and self._backend.id_to_token(token) is not None

    def _find_end_ids(self) -> frozenset[int]:
        """Combine both sources: some chat models name the end of a turn in only one of them."""
        named = self.token_id(self.config.special_tokens.get("eos_token", ""))
        return frozenset(self.config.end_ids) | ({named} if named is not None else set())

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """The tokens that the file adds before a text, mostly one or none."""
        ids = _encode_ids(self._backend, _ANY_LETTER)
        plain = _encode_ids(self._backend, _ANY_LETTER, add_special_tokens=False)
        places = range(len(ids) - len(plain) + 1)
        found = next((n for n in places if ids[n : n + len(plain)] == plain), 0)
        return tuple(ids[:found])

    @cached_property
    def _has_no_prefix_space(self) -> bool:
        """Whether no space is added before a text, so that parts can be encoded separately."""
        alone = _encode_ids(self._backend, _ANY_LETTER, add_special_tokens=False)
        return alone == self._encode_plain(_ANY_LETTER, after=_ANCHOR)

    @cached_property
    def _decoder_json(self) -> str | None:
        decoder = self._backend.decoder
        return None if decoder is None else bytes(decoder.__getstate__()).decode()

    @cached_property
    def _letter_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer without control tokens, created when first needed."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _find_control_tokens(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of the text that would become control tokens."""
        if self._suspect is not None and not self._suspect.search(text):
            return []
        encoding = _encode_text(self._backend, text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [span for i, span in spans if i in self.control_ids]

    def _encode_plain(self, text: str, *, after: str) -> list[int]:
        return _encode_after_anchor(self._backend, text, after=after)

    def _encode_as_letters(self, text: str, *, after: str) -> list[int]:
        ids = _encode_after_anchor(self._letter_backend, text, after=after)
        if self.control_ids.isdisjoint(ids):
            return ids
        raise UsageError(
            f"the prompt contains {text[:80]!r}, a control token of the base that its tokenizer "
            "cannot encode as letters",
            hint="remove it from the prompt",
        )


@contextmanager
def _wrap_library_errors(name: str, fact: str) -> Iterator[None]:
    """Turn exceptions and panics of the library into errors about the file.

    Raises:
        InvalidPackageError: with the message of the library.
    """
    try:
        yield
    except Exception as error:  # the library raises no other class
        raise InvalidPackageError(name, [f"{fact}: {error}"]) from error
    except BaseException as error:  # a panic is not an `Exception` and has no public class
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidPackageError(name, [f"{fact}: {error}"]) from error


def _encode_text(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True
) -> tokenizers.Encoding:
    with _wrap_library_errors(TOKENIZER_FILE, "it cannot encode a text"):
        return backend.encode(text, add_special_tokens=add_special_tokens)


def _encode_ids(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True
) -> list[int]:
    return list(_encode_text(backend, text, add_special_tokens=add_special_tokens).ids)


def _decode_ids(
    backend: tokenizers.Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool
) -> str:
    with _wrap_library_errors(TOKENIZER_FILE, "it cannot decode tokens"):
        return str(backend.decode(list(ids), skip_special_tokens=skip_special_tokens))


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is not valid Unicode at character {error.start}", hint="pass it as UTF-8"
        ) from error


def _control_token_pattern(control: Iterable[Any]) -> re.Pattern[str] | None:
    """Return the pattern of spelled control tokens; None if normalising could create one."""
    tokens = list(control)
    if any(token.normalized for token in tokens):
        return None
    return re.compile("|".join(re.escape(token.content) for token in tokens) or "(?!)")


def _encode_after_anchor(backend: tokenizers.Tokenizer, text: str, *, after: str) -> list[int]:
    """Encode a piece within a text: after an anchor, whose tokens are then removed.

    Some tokenizers add a space at the beginning of a text; a piece is not at the beginning.
    """
    ids = _encode_ids(backend, after + text, add_special_tokens=False)
    anchor = _encode_ids(backend, after, add_special_tokens=False)
    if ids[: len(anchor)] != anchor:
        return _encode_ids(backend, text, add_special_tokens=False)
    return ids[len(anchor) :]


class IncrementalDetokenizer:
    """Converts tokens to text as they arrive; text that was returned never changes.

    The text of a few tokens is compared with that of the same tokens and one more, because spaces
    and UTF-8 sequences extend across tokens. An incomplete sequence is held back, and dropped if
    the text ends within it.
    """

    def __init__(self, tokenizer: Tokenizer, *, raw: bool = False) -> None:
        """Start with no tokens; with ``raw``, control tokens are spelled out."""
        self._tokenizer, self._raw = tokenizer, raw
        self._decode = tokenizer.decode_raw if raw else tokenizer.decode
        self._context: list[int] = []  # tokens of the last text that was returned
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add one token; return the text that is now final."""
        if not (self._raw or self._tokenizer.has_text(token)):
            return ""
        self._pending.append(token)
        text = self._decode_pending()
        if text.endswith(_REPLACEMENT_CHARACTER) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the text that was held back, without an incomplete character at its end."""
        part = self._drop_incomplete_tokens()
        text = self._decode_pending()
        self._context, self._pending = self._pending, []
        return text.removesuffix(_REPLACEMENT_CHARACTER) if part else text

    def _drop_incomplete_tokens(self) -> int:
        """Drop the tokens of an incomplete character; return how many bytes of it remain."""
        known = (self._tokenizer.token_bytes(token) for token in self._pending)
        # Tokens of unknown bytes are letters, which no incomplete character contains.
        spelt = [b"?" if data is None else data for data in known]
        unfinished = _count_incomplete_bytes(b"".join(spelt))
        while unfinished and len(spelt[-1]) <= unfinished:
            unfinished -= len(spelt.pop())
            self._pending.pop()
        return unfinished

    def _decode_pending(self) -> str:
        before = self._decode(self._context)
        both = self._decode(self._context + self._pending)
        if both.startswith(before):
            return both[len(before) :]
        return self._decode(self._pending)  # invalid bytes changed the text before them


def _count_incomplete_bytes(data: bytes) -> int:
    """Return how many bytes at the end start a UTF-8 character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
