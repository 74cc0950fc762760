"""Tokenizers that would end the process: refused before the library reads them.

The oracle is the library itself, in a process of its own: what is refused here does abort, and its
harmless neighbour does not. The recorded outcome of the first is kept with each case.
"""

import base64
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.base_model import read_base
from expertctl.package.tokenizer import canonicalise_tokenizer, find_tokenizer_problems
from tests.factories import write_base

VOCAB = {"a": 0, "b": 1, "ab": 2, "é": 3, "aé": 4, "##b": 5, "x\u0301": 6}
READ = """
import resource, sys, tokenizers
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
    tokenizer.decode(tokenizer.encode("aaa" * 1000, add_special_tokens=False).ids)
except BaseException:
    pass
"""


def bpe(*merges: list[str], **fields: Any) -> dict[str, Any]:
    parts = {key: fields.pop(key) for key in ("normalizer", "decoder") if key in fields}
    model = {"type": "BPE", "vocab": VOCAB, "merges": list(merges), **fields}
    return {"version": "1.0", "added_tokens": [], "model": model, **parts}


def charsmap(size: int, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(struct.pack("<I", size) + data).decode()
    return bpe(normalizer={"type": "Precompiled", "precompiled_charsmap": text})


def replaces(count: int, content: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return bpe(normalizer={"type": "Sequence", "normalizers": [one] * count})


def decoding(count: int, content: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return bpe(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, *([one] * count)]})


ABORTS = {
    "a prefix that cuts a letter": (
        bpe(["a", "é"], continuing_subword_prefix="#"),
        "model: merge 0 does not go with the continuing_subword_prefix",
    ),
    "a map that states eight gigabytes": (charsmap(2**32 - 4, b"x" * 8), "precompiled_charsmap"),
    "a chain that makes texts longer": (replaces(4, "a" * 1000), "over 256 times as long"),
    "the same while text is written": (decoding(4, "a" * 1000), "over 256 times as long"),
}
HARMLESS = {
    "a prefix that merges have": bpe(["a", "##b"], continuing_subword_prefix="##"),
    "no prefix": bpe(["a", "b"], continuing_subword_prefix=""),
    "a small map": charsmap(4, struct.pack("<I", 0) + b"x\0"),
    "a short chain": replaces(2, "▁"),
    "a short chain while text is written": decoding(2, " "),
}


def ends_of(document: Any, folder: Path) -> int:
    """Have the library read a file in a process of its own; return how that ends."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return subprocess.run([sys.executable, "-c", READ, str(file)], check=False).returncode


@pytest.mark.parametrize("case", ABORTS)
def test_what_would_end_the_process_is_refused_and_named(case: str) -> None:
    document, problem = ABORTS[case]
    [found] = find_tokenizer_problems(document)
    assert problem in found
    with pytest.raises(InvalidPackageError, match=r"tokenizer\.json") as refused:
        canonicalise_tokenizer(json.dumps(document).encode(), what="tokenizer.json")
    assert found in str(refused.value)


@pytest.mark.parametrize("case", HARMLESS)
def test_what_the_library_reads_is_not_refused(case: str) -> None:
    assert find_tokenizer_problems(HARMLESS[case]) == []
    canonicalise_tokenizer(json.dumps(HARMLESS[case]).encode(), what="tokenizer.json")


@pytest.mark.all
@pytest.mark.parametrize("case", ABORTS)
def test_the_library_aborts_on_what_is_refused(case: str, tmp_path: Path) -> None:
    assert ends_of(ABORTS[case][0], tmp_path) < 0


@pytest.mark.all
@pytest.mark.parametrize("case", HARMLESS)
def test_the_library_does_not_abort_on_the_rest(case: str, tmp_path: Path) -> None:
    assert ends_of(HARMLESS[case], tmp_path) == 0


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (bpe(["a", "b"], continuing_subword_prefix="##"), "merge 0"),
        (bpe(["a", "##b"], ["a", "b"], continuing_subword_prefix="##"), "merge 1"),
        (charsmap(0, b""), "precompiled_charsmap"),
        (charsmap(3, b"abc"), "precompiled_charsmap"),
        (charsmap(8, b"abcd"), "precompiled_charsmap"),
        (bpe(normalizer={"type": "Precompiled", "precompiled_charsmap": "A"}), "charsmap"),
        (bpe(normalizer={"type": "Prepend", "prepend": "a" * 1000}), "256 times"),
        (replaces(300, "a"), "300 normalizers, at most 256"),
        (bpe(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 300}), "300 decoders"),
        (
            {
                **bpe(),
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 300,
                },
            },
            "300 single",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_its_neighbours_are_refused_too(document: Any, problem: str) -> None:
    assert problem in "\n".join(find_tokenizer_problems(document))


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [[{}]], {"type": 7}, {"type": "Replace"}])
def test_parts_of_any_shape_are_looked_at(value: Any) -> None:
    document = dict.fromkeys(("model", "normalizer", "pre_tokenizer", "decoder"), value)
    assert find_tokenizer_problems(document) == []


def test_a_base_with_such_a_tokenizer_cannot_be_added(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    document, problem = ABORTS["a prefix that cuts a letter"]
    (base / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InvalidPackageError, match=problem):
        read_base(base)
