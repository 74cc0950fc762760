"""The canonical form of ``tokenizer.json``, whose digest names a tokenizer however it was saved.

Releases of the ``tokenizers`` library write the same tokenizer in different bytes. The form is the
RFC 8785 JSON of the document with what never changes a token taken out or written in one way:

- ``truncation`` and ``padding`` are left out: they hold the last call of whoever saved the file.
- Merges are pairs, each once, at its last rank. The notation ``"a b"`` has no merge with a space.
- Fields at the value that the library gives them where they are missing are left out.
- Added tokens are sorted by id, unless their order decides which id they get.
- Scores of a unigram model are rounded to float32, as SentencePiece stores them: the library
  itself changes their last digit when it reads them.

Anything else that differs gives another digest, also where it happens to tokenise alike.
"""

import struct
from collections.abc import Callable, Mapping

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError
from expertctl.package.tokenizer_limits import tokenizer_problems
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, load_object

FORM_VERSION = 2
"""``base.tokenizer_version`` of a manifest whose digest is that of this form; 1 hashes the file."""
MAX_TOKENIZER_BYTES = 128 << 20
MAX_ITEMS = 4_000_000
"""How many values a document may hold; the largest published vocabularies have two million."""

_SESSION = ("truncation", "padding")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_OLD_MERGES_HEADER = "#version"

_Defaults = Mapping[str, tuple[JsonValue, ...]]
_DOCUMENT: _Defaults = {
    "version": ("1.0",),
    "added_tokens": ([],),
    **dict.fromkeys(_PARTS, (None,)),
}
_PART: Mapping[str, _Defaults] = {
    "ByteLevel": {"use_regex": (True,)},
    "Metaspace": {"prepend_scheme": ("always",), "split": (True, None)},
    "Punctuation": {"behavior": ("Isolated",)},
}
_MODEL: Mapping[str, _Defaults] = {
    "BPE": {
        "dropout": (None,),
        "unk_token": (None,),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
        "fuse_unk": (False, None),
        "byte_fallback": (False, None),
        "ignore_merges": (False, None),
    },
    "Unigram": {"unk_id": (None,), "byte_fallback": (False,)},
}
_WORD_PIECE = {"unk_token", "continuing_subword_prefix", "max_input_chars_per_word"}


def tokenizer_digest(data: bytes, *, what: str) -> Digest:
    """Return the digest of the canonical form of a ``tokenizer.json``.

    Raises:
        InvalidPackageError: as `canonical_tokenizer`.
    """
    return Digest.of(canonical_tokenizer(data, what=what))


def canonical_tokenizer(data: bytes, *, what: str) -> bytes:
    """Return the canonical form of a ``tokenizer.json``.

    Raises:
        InvalidPackageError: when it is too large, is not strict JSON, has merges that the
            library does not read, or would end the process there.
    """
    if data.count(b",") >= MAX_ITEMS:
        raise InvalidPackageError(what, [f"more than {MAX_ITEMS:,} values"])
    document = load_object(data, what=what, max_bytes=MAX_TOKENIZER_BYTES)
    if problems := tokenizer_problems(document):
        raise InvalidPackageError(what, problems)
    try:
        return canonical(_form(document))
    except _RefusedError as error:
        raise InvalidPackageError(what, [str(error)]) from error


class _RefusedError(ValueError):
    """Why a document has no canonical form."""


def _form(document: JsonObject) -> JsonObject:
    form = {key: value for key, value in document.items() if key not in _SESSION}
    form |= {key: _part(form[key]) for key in _PARTS if key in form}
    if isinstance(model := form.get("model"), dict):
        form["model"] = _model(model)
        form["added_tokens"] = _by_id(form.get("added_tokens", []), model.get("vocab"))
    return _without(form, _DOCUMENT)


def _part(value: JsonValue) -> JsonValue:
    """Return a normalizer, pre-tokenizer, post-processor or decoder, or what is inside of one."""
    if isinstance(value, list):
        return [_part(item) for item in value]
    if not isinstance(value, dict):
        return value
    part = {key: _part(item) for key, item in value.items()}
    kind = part.get("type")
    if kind == "Metaspace":
        part = _metaspace(part)
    return _without(part, _PART.get(kind, {})) if isinstance(kind, str) else part


def _metaspace(part: JsonObject) -> JsonObject:
    """Drop the fields that ``prepend_scheme`` replaced, where they agree with it.

    The library reads ``add_prefix_space: true`` as nothing and refuses ``false`` beside any scheme
    but ``never``.
    """
    scheme, prefix = part.get("prepend_scheme"), part.get("add_prefix_space")
    agrees = prefix in (True, None) or (prefix is False and scheme == "never")
    replaced = {"str_rep", "add_prefix_space"} if agrees else {"str_rep"}
    return {key: value for key, value in part.items() if key not in replaced}


def _model(model: JsonObject) -> JsonObject:
    kind = model.get("type") or _kind(model)
    form: JsonObject = {**model, "type": kind}
    if not isinstance(kind, str):
        return form
    for key, rewrite in _REWRITTEN.get(kind, {}).items():
        if isinstance(value := model.get(key), list):
            form[key] = rewrite(value)
    return _without(form, _MODEL.get(kind, {}))


def _kind(model: JsonObject) -> str:
    """Return the kind of a model that names none, as files of old releases: tried in this order."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if model.keys() >= _WORD_PIECE else "WordLevel"


def _pairs(merges: list[JsonValue]) -> list[JsonValue]:
    """Return merges as pairs; of a pair that is there twice, the library takes the last rank."""
    pairs = _split(merges) if isinstance(merges[0] if merges else "", str) else merges
    found: dict[tuple[str, str], None] = {}
    for rank in range(len(pairs) - 1, -1, -1):
        match pairs[rank]:
            case [str(left), str(right)]:
                found.setdefault((left, right))
            case _:
                raise _RefusedError(f"model: merge {rank} is not a pair of texts like the first")
    return [[left, right] for left, right in reversed(found)]


def _split(merges: list[JsonValue]) -> list[JsonValue]:
    lines = [line for line in merges if not _is_header(line)]
    return [list(line.split(" ")) if isinstance(line, str) else None for line in lines]


def _is_header(line: JsonValue) -> bool:
    return isinstance(line, str) and line.startswith(_OLD_MERGES_HEADER)


def _scores(vocab: list[JsonValue]) -> list[JsonValue]:
    return [_scored(entry) for entry in vocab]


def _scored(entry: JsonValue) -> JsonValue:
    match entry:
        case [str(piece), int() | float() as score] if not isinstance(score, bool):
            return [piece, _float32(float(score))]
    return entry


def _float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return number
    return rounded


_REWRITTEN: Mapping[str, Mapping[str, Callable[[list[JsonValue]], list[JsonValue]]]] = {
    "BPE": {"merges": _pairs},
    "Unigram": {"vocab": _scores},
}


def _by_id(tokens: JsonValue, vocab: JsonValue) -> JsonValue:
    """Sort added tokens by id where that changes nothing.

    The library gives ids in the order of the file to tokens that are not in the vocabulary, and
    of two that are equal once normalised, the first counts.
    """
    if not isinstance(tokens, list):
        return tokens
    known = _ids(vocab)
    entries = [token for token in tokens if isinstance(token, dict)]
    ids = [token.get("id") for token in entries]
    if len(entries) != len(tokens) or not all(type(i) is int for i in ids):
        return tokens
    ordered = sorted(entries, key=_id)
    bound = [token for token in entries if _is_bound(token, known)]
    return list(ordered) if bound == sorted(bound, key=_id) else tokens


def _id(token: JsonObject) -> int:
    number = token["id"]
    assert isinstance(number, int)
    return number


def _is_bound(token: JsonObject, known: Mapping[str, JsonValue]) -> bool:
    """Tell whether the place of an added token among its like has a meaning."""
    content = token.get("content")
    own = isinstance(content, str) and known.get(content) == token["id"]
    return not own or token.get("normalized") is not False


def _ids(vocab: JsonValue) -> Mapping[str, JsonValue]:
    if isinstance(vocab, dict):
        return vocab
    rows = enumerate(vocab) if isinstance(vocab, list) else ()
    return {row[0]: i for i, row in rows if isinstance(row, list) and row and type(row[0]) is str}


def _without(value: JsonObject, defaults: _Defaults) -> JsonObject:
    return {k: v for k, v in value.items() if not _is_one_of(v, defaults.get(k, ()))}


def _is_one_of(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in neutral)
