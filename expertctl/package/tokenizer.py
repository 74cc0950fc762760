"""``tokenizer.json``: its canonical form, and what must be refused before it is loaded.

The digest of the canonical form identifies a tokenizer however it was saved, as releases of the
``tokenizers`` library write the same tokenizer in different bytes. The form is the RFC 8785 JSON of
the document, with everything that never changes a token removed or normalised:

- ``truncation`` and ``padding`` are removed: they hold the last call of whoever saved the file.
- Merges are pairs, each once, at its last rank. The notation ``"a b"`` has no merge with a space.
- Fields with the library's default for missing ones are removed.
- Added tokens are sorted by id, unless their order decides which id they get.
- Scores of a unigram model are rounded to float32, as SentencePiece stores them: the library
  itself changes their last digit when it reads them.

Any other difference gives another digest, even if it happens not to change any tokens.

The library is compiled code. If it panics, Python gets an exception. If it cannot allocate memory,
or panics while formatting a panic, it aborts the process. `find_tokenizer_problems` refuses the
known causes:

- merges that do not start with the ``continuing_subword_prefix``, of which it cuts off as many
  bytes;
- a ``precompiled_charsmap`` whose stated size is wrong;
- steps that together make a text longer without bound, as a chain of ``Replace`` does.
"""

import base64
import binascii
import struct
from collections.abc import Callable, Iterator, Mapping

from expertctl.errors import InvalidPackageError
from expertctl.reference import Digest
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object

MAX_GROWTH = 256
"""The largest factor by which all steps of one kind together may lengthen a text."""
MAX_LIST_ITEMS = 256
"""The largest number of steps in one list; each reads the whole text."""
_PIPELINE_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_NESTED_LISTS = ("normalizers", "pretokenizers", "processors", "decoders", "single", "pair")


def find_tokenizer_problems(document: JsonObject) -> list[str]:
    """Return what in a ``tokenizer.json`` could abort the process, without duplicates."""
    found = list(_find_model_problems(document.get("model")))
    for name in _PIPELINE_STEPS:
        parts = list(_iter_steps(document.get(name)))
        found += [f"{name}: {problem}" for part in parts for problem in _find_step_problems(part)]
        growth = 1.0
        for part in parts:
            growth = min(growth * _estimate_growth(part), 1e18)
        if growth > MAX_GROWTH:
            found.append(f"{name}: it can make a text over {MAX_GROWTH} times as long")
    return list(dict.fromkeys(found))


def _find_model_problems(model: JsonValue) -> Iterator[str]:
    if not isinstance(model, dict):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    size = len(prefix.encode())
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        right = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(right, str) and not _can_drop_prefix(right.encode(), size):
            yield f"model: merge {rank} does not go with the continuing_subword_prefix"
            return


def _can_drop_prefix(data: bytes, size: int) -> bool:
    """Tell whether a text without its first ``size`` bytes is still a text."""
    return len(data) >= size and (len(data) == size or data[size] & 0xC0 != 0x80)


def _iter_steps(value: JsonValue) -> Iterator[JsonObject]:
    """Yield a step and all steps inside it; the depth of a document is bounded."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _iter_steps(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_steps(inner)


def _find_step_problems(part: JsonObject) -> Iterator[str]:
    for name in _NESTED_LISTS:
        if isinstance(inner := part.get(name), list) and len(inner) > MAX_LIST_ITEMS:
            yield f"{len(inner)} {name}, at most {MAX_LIST_ITEMS} are read"
    charsmap = part.get("precompiled_charsmap")
    if isinstance(charsmap, str) and not _is_valid_charsmap(charsmap):
        yield "the precompiled_charsmap does not have the size that it states"


def _is_valid_charsmap(text: str) -> bool:
    """Tell whether a map begins with the size of its trie and is long enough for it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(data) < 4:
        return False
    size = int(struct.unpack_from("<I", data)[0])
    return 0 < size <= len(data) - 4 and size % 4 == 0


def _estimate_growth(part: JsonObject) -> float:
    """Return the factor by which one step may lengthen a text, without the steps inside it."""
    match part.get("type"):
        case "Replace":
            pattern, content = part.get("pattern"), part.get("content")
            plain = pattern.get("String") if isinstance(pattern, dict) else None
            size = len(plain) if isinstance(plain, str) else 1
            return max(1.0, len(content) / max(1, size)) if isinstance(content, str) else 1.0
        case "Prepend":
            text = part.get("prepend")
            return 1.0 + (len(text) if isinstance(text, str) else 0)
        case "Metaspace":
            return 2.0
        case "TemplateProcessing":
            single = part.get("single")
            return float(max(1, len(single))) if isinstance(single, list) else 1.0
        case _:
            return 1.0


FORM_VERSION = 2
"""The ``base.tokenizer_version`` of a digest of this form; version 1 hashes the file."""
MAX_TOKENIZER_BYTES = 128 << 20
MAX_ITEMS = 4_000_000
"""The largest number of values in a document; the largest published one has two million."""

_SESSION_FIELDS = ("truncation", "padding")
_OLD_MERGES_HEADER = "#version"

_Defaults = Mapping[str, tuple[JsonValue, ...]]
_DOCUMENT_DEFAULTS: _Defaults = {
    "version": ("1.0",),
    "added_tokens": ([],),
    **dict.fromkeys(_PIPELINE_STEPS, (None,)),
}
_STEP_DEFAULTS: Mapping[str, _Defaults] = {
    "ByteLevel": {"use_regex": (True,)},
    "Metaspace": {"prepend_scheme": ("always",), "split": (True, None)},
    "Punctuation": {"behavior": ("Isolated",)},
}
_MODEL_DEFAULTS: Mapping[str, _Defaults] = {
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


def compute_tokenizer_digest(data: bytes, *, what: str) -> Digest:
    """Return the digest of the canonical form; raises as `canonicalise_tokenizer`."""
    return Digest.compute(canonicalise_tokenizer(data, what=what))


def canonicalise_tokenizer(data: bytes, *, what: str) -> bytes:
    """Return the canonical form of a ``tokenizer.json``.

    Raises:
        InvalidPackageError: when it is too large, is not strict JSON, has merges that the
            library does not read, or could abort the process.
    """
    if data.count(b",") >= MAX_ITEMS:
        raise InvalidPackageError(what, [f"more than {MAX_ITEMS:,} values"])
    document = load_object(data, what=what, max_bytes=MAX_TOKENIZER_BYTES)
    if problems := find_tokenizer_problems(document):
        raise InvalidPackageError(what, problems)
    try:
        return encode_canonical(_canonicalise_document(document))
    except _NoCanonicalFormError as error:
        raise InvalidPackageError(what, [str(error)]) from error


class _NoCanonicalFormError(ValueError):
    """Why a document has no canonical form."""


def _canonicalise_document(document: JsonObject) -> JsonObject:
    form = {key: value for key, value in document.items() if key not in _SESSION_FIELDS}
    form |= {key: _canonicalise_step(form[key]) for key in _PIPELINE_STEPS if key in form}
    if isinstance(model := form.get("model"), dict):
        form["model"] = _canonicalise_model(model)
        form["added_tokens"] = _sort_by_id(form.get("added_tokens", []), model.get("vocab"))
    return _drop_defaults(form, _DOCUMENT_DEFAULTS)


def _canonicalise_step(value: JsonValue) -> JsonValue:
    """Return the form of a normalizer, pre-tokenizer, post-processor or decoder, recursively."""
    if isinstance(value, list):
        return [_canonicalise_step(item) for item in value]
    if not isinstance(value, dict):
        return value
    part = {key: _canonicalise_step(item) for key, item in value.items()}
    kind = part.get("type")
    if kind == "Metaspace":
        part = _canonicalise_metaspace(part)
    return _drop_defaults(part, _STEP_DEFAULTS.get(kind, {})) if isinstance(kind, str) else part


def _canonicalise_metaspace(part: JsonObject) -> JsonObject:
    """Drop the fields that ``prepend_scheme`` replaced, if they agree with it.

    The library ignores ``add_prefix_space: true`` and refuses ``false`` with any scheme but
    ``never``.
    """
    scheme, prefix = part.get("prepend_scheme"), part.get("add_prefix_space")
    agrees = prefix in (True, None) or (prefix is False and scheme == "never")
    replaced = {"str_rep", "add_prefix_space"} if agrees else {"str_rep"}
    return {key: value for key, value in part.items() if key not in replaced}


def _canonicalise_model(model: JsonObject) -> JsonObject:
    kind = model.get("type") or _infer_model_kind(model)
    form: JsonObject = {**model, "type": kind}
    if not isinstance(kind, str):
        return form
    for key, rewrite in _REWRITERS.get(kind, {}).items():
        if isinstance(value := model.get(key), list):
            form[key] = rewrite(value)
    return _drop_defaults(form, _MODEL_DEFAULTS.get(kind, {}))


def _infer_model_kind(model: JsonObject) -> str:
    """Return the kind of a model without one, as in files of old releases, tested in this order."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if model.keys() >= _WORD_PIECE else "WordLevel"


def _to_merge_pairs(merges: list[JsonValue]) -> list[JsonValue]:
    """Return merges as pairs; of duplicates, the library uses the last rank."""
    pairs = _split_merges(merges) if isinstance(merges[0] if merges else "", str) else merges
    found: dict[tuple[str, str], None] = {}
    for rank in range(len(pairs) - 1, -1, -1):
        match pairs[rank]:
            case [str(left), str(right)]:
                found.setdefault((left, right))
            case _:
                raise _NoCanonicalFormError(
                    f"model: merge {rank} is not a pair of texts like the first"
                )
    return [[left, right] for left, right in reversed(found)]


def _split_merges(merges: list[JsonValue]) -> list[JsonValue]:
    return [
        list(line.split(" ")) if isinstance(line, str) else None
        for line in merges
        if not (isinstance(line, str) and line.startswith(_OLD_MERGES_HEADER))
    ]


def _canonicalise_scores(vocab: list[JsonValue]) -> list[JsonValue]:
    return [_canonicalise_score(entry) for entry in vocab]


def _canonicalise_score(entry: JsonValue) -> JsonValue:
    match entry:
        case [str(piece), int() | float() as score] if not isinstance(score, bool):
            return [piece, _round_to_float32(float(score))]
    return entry


def _round_to_float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return number
    return rounded


_REWRITERS: Mapping[str, Mapping[str, Callable[[list[JsonValue]], list[JsonValue]]]] = {
    "BPE": {"merges": _to_merge_pairs},
    "Unigram": {"vocab": _canonicalise_scores},
}


def _sort_by_id(tokens: JsonValue, vocab: JsonValue) -> JsonValue:
    """Sort added tokens by id, if that changes nothing.

    The library assigns ids in file order to tokens that are not in the vocabulary, and of two
    tokens with the same normalised content, the first counts.
    """
    if not isinstance(tokens, list):
        return tokens
    known = _map_ids(vocab)
    entries = [token for token in tokens if isinstance(token, dict)]
    ids = [token.get("id") for token in entries]
    if len(entries) != len(tokens) or not all(type(i) is int for i in ids):
        return tokens
    ordered = sorted(entries, key=_token_id)
    bound = [token for token in entries if _has_fixed_place(token, known)]
    return list(ordered) if bound == sorted(bound, key=_token_id) else tokens


def _token_id(token: JsonObject) -> int:
    number = token["id"]
    assert isinstance(number, int)
    return number


def _has_fixed_place(token: JsonObject, known: Mapping[str, JsonValue]) -> bool:
    """Tell whether the order of an added token matters."""
    content = token.get("content")
    own = isinstance(content, str) and known.get(content) == token["id"]
    return not own or token.get("normalized") is not False


def _map_ids(vocab: JsonValue) -> Mapping[str, JsonValue]:
    if isinstance(vocab, dict):
        return vocab
    rows = enumerate(vocab) if isinstance(vocab, list) else ()
    return {row[0]: i for i, row in rows if isinstance(row, list) and row and type(row[0]) is str}


def _drop_defaults(value: JsonObject, defaults: _Defaults) -> JsonObject:
    return {k: v for k, v in value.items() if not _is_one_of(v, defaults.get(k, ()))}


def _is_one_of(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in neutral)
