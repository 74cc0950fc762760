"""The tokenizer of a GGUF file as files for the ``tokenizers`` library.

Two models are read. ``gpt2`` is byte-level BPE: ``tokenizer.ggml.pre`` names how a text is split
before merging (`_SPLITS`, the patterns that the models' own tokenizers have). ``llama`` is the BPE
of SentencePiece: merges follow from the scores of pieces, and unknown letters become bytes.

Tokens of the types *control* and *user-defined* are added tokens, found in a text before anything
else. They stand in the vocabulary only if tokens after them do. Padding is left out.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.gguf_file import GgufHeader, MetadataValue
from expertctl.schema.strict_json import JsonObject, JsonValue

_Item = TypeVar("_Item", str, int, float)
_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PADDING = re.compile(r"\[PAD[0-9]+\]")
_MAX_PIECE = 256
_MERGES_PER_TOKEN = 8
"""Pairs of pieces, on average, that make a piece; models have about two."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_END_NAMES = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>"),
    *("<|endoftext|>", "<EOT>", "<|return|>"),
)
"""Control tokens that end a turn, by name, besides those whose ids the file states."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LAST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_LAST}"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}{_LAST}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How a text is split before merging; each pattern splits the pieces of the one before."""

    patterns: tuple[str, ...] = ()
    """None: the pattern of GPT-2, which the library knows."""
    digits: bool = False
    """Whether each digit is a piece of its own, before all else."""
    composed: bool = False
    """Whether letters are composed first (NFC)."""
    whole_words: bool = False
    """Whether a piece that is a token is not merged."""
    begin: bool = False
    """Whether a token begins a text, if the file does not say."""


_LLAMA3 = _Split(patterns=(_WORDS + r"\p{N}{1,3}" + _TAIL,), whole_words=True, begin=True)
_QWEN2 = _Split(patterns=(_WORDS + r"\p{N}" + _TAIL,), composed=True)
_LIKE_LLAMA3 = _Split(patterns=_LLAMA3.patterns)
_LIKE_QWEN2 = _Split(patterns=_QWEN2.patterns)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_SPLITS: Mapping[str, _Split] = {
    "default": _Split(patterns=(_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "exaone4"), _Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _Split(digits=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), _LIKE_QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_LLAMA3),
    "glm4": _Split(patterns=_LLAMA3.patterns, whole_words=True),
    "tekken": _Split(patterns=(_TEKKEN,), whole_words=True),
    "gpt-4o": _Split(patterns=(_GPT4O,)),
    "falcon": _Split(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split(patterns=_DEEPSEEK3)),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file, checked."""

    what: str
    tokens: Sequence[str]
    types: Sequence[int]
    metadata: Mapping[str, MetadataValue]

    def get_flag(self, name: str, *, default: bool) -> bool:
        value = self.metadata.get(f"{_PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise InvalidPackageError(self.what, [f"{_PREFIX}{name} is no boolean"])
        return value

    def find_token(self, name: str) -> int | None:
        """Return the id that the file states for a token, such as ``eos``."""
        value = self.metadata.get(f"{_PREFIX}{name}_token_id")
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            problem = f"{_PREFIX}{name}_token_id is {value!r:.40}, there are {len(self.tokens)}"
            raise InvalidPackageError(self.what, [problem])
        return value

    def is_added(self, token: int) -> bool:
        """Tell whether a token is found in a text before anything else."""
        return self.types[token] in (_CONTROL, _USER, _UNKNOWN)

    def is_padding(self, token: int) -> bool:
        """Tell whether a token only fills the vocabulary up."""
        return self.types[token] == _UNUSED and bool(_PADDING.fullmatch(self.tokens[token]))


def build_tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and the small files beside it, by name.

    Raises:
        IncompatibleError: when the kind of tokenizer is not supported.
        InvalidPackageError: when its lists contradict each other.
    """
    vocabulary = _read_vocabulary(header)
    model = vocabulary.metadata.get(f"{_PREFIX}model")
    match model:
        case "gpt2":
            tokenizer, begins = _build_byte_level(vocabulary)
        case "llama":
            tokenizer, begins = _build_sentence_piece(vocabulary)
        case _:
            raise IncompatibleError(
                f"{header.path}: the tokenizer model {model!r:.40} is not supported",
                hint="supported in GGUF are gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
            )
    tokenizer["post_processor"] = _build_post_processor(vocabulary, begins=begins)
    return {
        "tokenizer.json": _encode(tokenizer),
        "tokenizer_config.json": _encode(_build_settings(vocabulary, begins=begins)),
        "generation_config.json": _encode({"eos_token_id": _list_end_ids(vocabulary)}),
    }


def _encode(document: JsonObject) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _read_vocabulary(header: GgufHeader) -> _Vocabulary:
    what, metadata = str(header.path), header.metadata
    tokens = _get_list(what, metadata, "tokens", str)
    types = _get_list(what, metadata, "token_type", int) or [_NORMAL] * len(tokens)
    if not tokens:
        raise InvalidPackageError(what, [f"{_PREFIX}tokens is missing"])
    if len(types) != len(tokens):
        problem = f"{_PREFIX}token_type has {len(types)} items for {len(tokens)} tokens"
        raise InvalidPackageError(what, [problem])
    seen: set[str] = set()
    for token in tokens:
        if token in seen:
            raise InvalidPackageError(what, [f"{_PREFIX}tokens has {token[:80]!r} twice"])
        seen.add(token)
    return _Vocabulary(what, tokens, types, metadata)


def _get_list(
    what: str, metadata: Mapping[str, MetadataValue], name: str, kind: type[_Item]
) -> list[_Item]:
    """Return a list of one type; empty if it is missing."""
    value = metadata.get(f"{_PREFIX}{name}", ())
    if not isinstance(value, tuple):
        raise InvalidPackageError(what, [f"{_PREFIX}{name} is no list"])
    found = [item for item in value if type(item) is kind]
    if len(found) != len(value):
        raise InvalidPackageError(what, [f"{_PREFIX}{name} has items that are no {kind.__name__}"])
    return found


def _build_byte_level(vocabulary: _Vocabulary) -> tuple[JsonObject, bool]:
    """Return the document of a byte-level tokenizer, and whether a token begins a text."""
    name = vocabulary.metadata.get(f"{_PREFIX}pre", "default")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise IncompatibleError(
            f"{vocabulary.what}: the pre-tokenizer {name!r:.40} is not supported",
            hint=f"supported in GGUF are {', '.join(_SPLITS)}",
        )
    in_vocabulary = _find_vocabulary(vocabulary)
    merges = _get_list(vocabulary.what, vocabulary.metadata, "merges", str)
    document = _build_document(
        vocabulary,
        normalizer={"type": "NFC"} if split.composed else None,
        pre_tokenizer=_build_split(split),
        decoder=_make_byte_level(use_regex=True, prefix=True),
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.whole_words,
            "vocab": in_vocabulary,
            "merges": _split_merges(vocabulary.what, merges, in_vocabulary),
        },
    )
    return document, vocabulary.get_flag("add_bos_token", default=split.begin)


def _build_document(
    vocabulary: _Vocabulary,
    *,
    normalizer: JsonValue,
    pre_tokenizer: JsonValue,
    decoder: JsonValue,
    model: JsonObject,
) -> JsonObject:
    added = [number for number in range(len(vocabulary.tokens)) if vocabulary.is_added(number)]
    none = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_make_added_token(vocabulary, number) for number in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", **none, **model},
    }


def _make_added_token(vocabulary: _Vocabulary, number: int) -> JsonObject:
    return {
        "id": number,
        "content": vocabulary.tokens[number],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": vocabulary.types[number] != _USER,
    }


def _find_vocabulary(vocabulary: _Vocabulary) -> dict[str, JsonValue]:
    """Return the vocabulary of the model by token.

    The library numbers added tokens from the end of the vocabulary on, so they may be left out of
    it only if they follow it without a gap.
    """
    kept = [n for n in range(len(vocabulary.tokens)) if not vocabulary.is_padding(n)]
    end = len(kept)
    while end and vocabulary.is_added(kept[end - 1]) and vocabulary.tokens[kept[end - 1]]:
        end -= 1
    if kept != list(range(len(kept))) or not end:
        end = len(kept)
    return {vocabulary.tokens[number]: number for number in kept[:end]}


def _split_merges(
    what: str, merges: Sequence[str], vocabulary: Mapping[str, JsonValue]
) -> list[JsonValue]:
    """Return merges as pairs; each must make a token from two."""
    pairs: list[JsonValue] = []
    for rank, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        parts = (left, right, left + right)
        if not space or " " in right or not all(part in vocabulary for part in parts):
            problem = f"{_PREFIX}merges: {merge[:80]!r} at {rank} does not make a token from two"
            raise InvalidPackageError(what, [problem])
        pairs.append([left, right])
    return pairs


def _make_byte_level(*, use_regex: bool, prefix: bool = False, trim: bool = True) -> JsonObject:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": trim,
        "use_regex": use_regex,
    }


def _build_split(split: _Split) -> JsonObject:
    steps: list[JsonValue] = []
    if split.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    for pattern in split.patterns:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    is_plain = not split.patterns
    last = _make_byte_level(use_regex=is_plain, trim=not split.composed)
    return {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last


def _build_sentence_piece(vocabulary: _Vocabulary) -> tuple[JsonObject, bool]:
    """Return the document of a SentencePiece tokenizer, and whether a token begins a text."""
    tokens = vocabulary.tokens
    scores = _get_list(vocabulary.what, vocabulary.metadata, "scores", float)
    if len(scores) != len(tokens):
        problem = f"{_PREFIX}scores has {len(scores)} items for {len(tokens)} tokens"
        raise InvalidPackageError(vocabulary.what, [problem])
    unknown = vocabulary.find_token("unknown")
    if unknown is None:
        unknown = next((n for n, kind in enumerate(vocabulary.types) if kind == _UNKNOWN), None)
    prefix = vocabulary.get_flag("add_space_prefix", default=True)
    spaces: JsonObject = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before: list[JsonValue] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    decoders: list[JsonValue] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    document = _build_document(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*before, spaces]} if before else spaces,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _rank_merges(vocabulary, scores),
        },
    )
    return document, vocabulary.get_flag("add_bos_token", default=True)


def _rank_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[JsonValue]:
    """Return all pairs of pieces that make a piece, those with the highest scores first.

    Raises:
        InvalidPackageError: when they are far more than a model has.
    """
    mergeable = {
        token: number
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.types[number] in (_NORMAL, _USER, _UNUSED) and len(token) <= _MAX_PIECE
    }
    found = (
        (-scores[number], mergeable[left], mergeable[right], left, right)
        for piece, number in mergeable.items()
        for left, right in _iter_halves(piece)
        if left in mergeable and right in mergeable
    )
    limit = _MERGES_PER_TOKEN * len(vocabulary.tokens)
    ranked = list(islice(found, limit + 1))
    if len(ranked) > limit:
        problem = f"{_PREFIX}tokens: more than {limit} pairs of them make another one"
        raise InvalidPackageError(vocabulary.what, [problem])
    return [[left, right] for *_, left, right in sorted(ranked)]


def _iter_halves(piece: str) -> Iterator[tuple[str, str]]:
    return ((piece[:n], piece[n:]) for n in range(1, len(piece)))


def _build_post_processor(vocabulary: _Vocabulary, *, begins: bool) -> JsonValue:
    """Return the step that adds tokens around a text; None if there are none."""
    begin = vocabulary.find_token("bos") if begins else None
    is_ended = vocabulary.get_flag("add_eos_token", default=False)
    end = vocabulary.find_token("eos") if is_ended else None
    around = [number for number in (begin, end) if number is not None]
    if not around:
        return None

    def arrange(name: str, kind: int) -> list[JsonValue]:
        text: JsonObject = {"Sequence": {"id": name, "type_id": kind}}
        parts = (begin, text, end)
        return [
            part
            if isinstance(part, dict)
            else {"SpecialToken": {"id": vocabulary.tokens[part], "type_id": kind}}
            for part in parts
            if part is not None
        ]

    tokens = [vocabulary.tokens[number] for number in around]
    special: JsonObject = {
        token: {"id": token, "ids": [number], "tokens": [token]}
        for token, number in zip(tokens, around, strict=True)
    }
    return {
        "type": "TemplateProcessing",
        "single": arrange("A", 0),
        "pair": [*arrange("A", 0), *arrange("B", 1)],
        "special_tokens": special,
    }


def _build_settings(vocabulary: _Vocabulary, *, begins: bool) -> JsonObject:
    settings: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": begins,
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    for name, stored in names.items():
        number = vocabulary.find_token(stored)
        if number is not None:
            settings[f"{name}_token"] = vocabulary.tokens[number]
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def _list_end_ids(vocabulary: _Vocabulary) -> list[JsonValue]:
    """Return the tokens that end an answer: those that the file states, and those known by name."""
    stated = [vocabulary.find_token(name) for name in ("eos", "eot", "eom")]
    found = {number for number in stated if number is not None}
    for number, token in enumerate(vocabulary.tokens):
        if vocabulary.types[number] == _CONTROL and token in _END_NAMES:
            found.add(number)
    return [*sorted(found)]
