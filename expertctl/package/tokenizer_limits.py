"""What a ``tokenizer.json`` must not contain: it makes the ``tokenizers`` library end the process.

The library is compiled code. Where it panics, Python sees an exception, which the reader of the
base turns into an error. Where it cannot have memory, or panics while it words a panic, it aborts,
and nothing can be caught. These are the known ways to that, refused before the library sees the
file:

- merges that a ``continuing_subword_prefix`` does not fit, of which it cuts off as many bytes;
- a ``precompiled_charsmap`` that states another size than it has;
- parts that together make a text longer without bound, as a chain of ``Replace`` does.
"""

import base64
import binascii
import struct
from collections.abc import Iterator

from expertctl.schema.strict_json import JsonObject, JsonValue

MAX_GROWTH = 256
"""How many times as long the parts of one kind may make a text, all together."""
MAX_LIST = 256
"""How many parts stand in one list; each reads the whole text."""
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders", "single", "pair")


def tokenizer_problems(document: JsonObject) -> list[str]:
    """Return what in a ``tokenizer.json`` could end the process, each problem once."""
    found = list(_model_problems(document.get("model")))
    for name in _PARTS:
        parts = list(_parts(document.get(name)))
        found += [f"{name}: {problem}" for part in parts for problem in _part_problems(part)]
        growth = 1.0
        for part in parts:
            growth = min(growth * _growth(part), 1e18)
        if growth > MAX_GROWTH:
            found.append(f"{name}: it can make a text over {MAX_GROWTH} times as long")
    return list(dict.fromkeys(found))


def _model_problems(model: JsonValue) -> Iterator[str]:
    if not isinstance(model, dict):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    size = len(prefix.encode())
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        right = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(right, str) and not _can_lose(right.encode(), size):
            yield f"model: merge {rank} does not go with the continuing_subword_prefix"
            return


def _can_lose(data: bytes, size: int) -> bool:
    """Tell whether a text can lose so many bytes at its beginning and be a text."""
    return len(data) >= size and (len(data) == size or data[size] & 0xC0 != 0x80)


def _parts(value: JsonValue) -> Iterator[JsonObject]:
    """Yield a part and all parts inside of it; the depth of a document is bounded."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def _part_problems(part: JsonObject) -> Iterator[str]:
    for name in _LISTS:
        if isinstance(inner := part.get(name), list) and len(inner) > MAX_LIST:
            yield f"{len(inner)} {name}, at most {MAX_LIST} are read"
    charsmap = part.get("precompiled_charsmap")
    if isinstance(charsmap, str) and not _is_charsmap(charsmap):
        yield "the precompiled_charsmap does not have the size that it states"


def _is_charsmap(text: str) -> bool:
    """Tell whether a map begins with the size of its trie, and has it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(data) < 4:
        return False
    size = int(struct.unpack_from("<I", data)[0])
    return 0 < size <= len(data) - 4 and size % 4 == 0


def _growth(part: JsonObject) -> float:
    """Return how many times as long one part may make a text, those inside of it not counted."""
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
