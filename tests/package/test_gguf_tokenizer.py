"""Tokenizers of GGUF files, as the ``tokenizers`` library reads what follows from them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import InvalidPackageError
from expertctl.package.gguf_file import read_gguf_header
from expertctl.package.gguf_tokenizer import build_tokenizer_files
from expertctl.package.tokenizer import canonicalise_tokenizer
from tests.factories import CHAT_TEMPLATE, byte_alphabet, write_base
from tests.gguf_files import write_gguf

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXTS = (
    "Hello, world! It's 2024.",
    "  two  spaces\n\n\nand\ttabs ",
    "Привет 123 日本語 مرحبا",
    "naïve e\u0301 ½ 👩‍👧",
    "<|im_start|> is spelled",
)


def build(tmp_path: Path, **changed: Any) -> Path:
    base = write_base(tmp_path / "base", layers=1)
    path = write_gguf(tmp_path / "model.gguf", base, **changed)
    for name, data in build_tokenizer_files(read_gguf_header(path)).items():
        (base / name).write_bytes(data)
    return base


def test_a_byte_level_tokenizer_is_the_one_that_was_stored(tmp_path: Path) -> None:
    known = Tokenizer.open(write_base(tmp_path / "known", layers=1))
    found = Tokenizer.open(build(tmp_path))
    for text in TEXTS:
        assert found.encode(text) == known.encode(text)
        assert found.decode(found.encode(text)) == text
    assert found.config.template is not None
    assert found.config.template.text == CHAT_TEMPLATE
    assert (found.control_ids, found.end_ids) == (known.control_ids, known.end_ids)
    assert found.config.special_tokens == {"eos_token": "<|im_end|>"}
    assert found.size == known.size


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "\u0120123", "\u0120ab", "!\u0120"]),
        ("smollm", ["It", "'s", "\u0120", "1", "2", "3", "\u0120ab", "!\u0120"]),
        ("qwen2", ["It", "'s", "\u0120", "1", "2", "3", "\u0120ab", "!", "\u0120"]),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "\u0120ab", "!", "\u0120"]),
        ("tekken", ["It", "'s", "\u0120", "1", "2", "3", "\u0120ab", "!", "\u0120"]),
        ("default", ["It", "'", "s", "\u0120", "123", "\u0120ab", "!", "\u0120"]),
    ],
)
def test_a_text_is_split_as_the_file_names_it(pre: str, pieces: list[str], tmp_path: Path) -> None:
    base = build(tmp_path, tokenizer__ggml__pre=pre)
    split = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json")).pre_tokenizer
    found = [piece for piece, _ in split.pre_tokenize_str("It's 123 ab! ")]
    assert "".join(found) == "".join(pieces)
    if pre != "gpt-2":
        assert found == pieces or pre in {"smollm", "tekken"}


def test_merges_are_applied_by_rank(tmp_path: Path) -> None:
    tokens = [*byte_alphabet(), "ab", "abc", "<|end|>", "[PAD259]"]
    base = build(
        tmp_path,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[1] * 258 + [3, 5],
        tokenizer__ggml__merges=["a b", "ab c"],
        tokenizer__ggml__bos_token_id=258,
        tokenizer__ggml__eos_token_id=258,
        tokenizer__ggml__add_bos_token=True,
    )
    found = Tokenizer.open(base)
    assert found.encode("abcab") == [258, 257, 256]
    assert found.token_id("<|end|>") == 258
    assert found.token_id("[PAD259]") is None
    assert found.end_ids == {258}


def build_sentence_piece(tmp_path: Path, **changed: Any) -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [_SPACE, "a", "b", "c", "ab", "bc", f"{_SPACE}a", f"{_SPACE}ab"]
    scores = [-5.0, -6.0, -7.0, -8.0, -2.0, -1.0, -4.0, -3.0]
    settings = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": None,
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", *pieces, *words],
        "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer__ggml__scores": [0.0] * 259 + scores,
        "tokenizer__ggml__add_bos_token": None,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
    }
    return Tokenizer.open(build(tmp_path, **{**settings, **changed}))


def test_a_sentence_piece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    found = build_sentence_piece(tmp_path)
    ids = {name: found.token_id(name) for name in ("bc", f"{_SPACE}a", f"{_SPACE}ab", "c")}
    assert found.encode("abc") == [1, ids[f"{_SPACE}a"], ids["bc"]]
    assert found.encode("ab") == [1, ids[f"{_SPACE}ab"]]
    for text in (*TEXTS[:4], "<s> is spelled"):
        assert found.decode(found.encode(text)) == text


def test_a_sentence_piece_tokenizer_may_add_no_space(tmp_path: Path) -> None:
    found = build_sentence_piece(
        tmp_path, tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=False
    )
    assert found.encode("bc") == [found.token_id("bc")]
    assert found.decode(found.encode(" bc")) == " bc"


def test_what_is_written_has_a_canonical_form(tmp_path: Path) -> None:
    data = (build(tmp_path) / "tokenizer.json").read_bytes()
    form = json.loads(canonicalise_tokenizer(data, what="tokenizer.json"))
    assert form["model"]["type"] == "BPE"


def test_pieces_of_which_every_split_is_a_merge_are_refused(tmp_path: Path) -> None:
    """Their pairs would take far more memory than the file."""
    words = ["".join(each) for n in range(1, 12) for each in itertools.product("ab", repeat=n)]
    with pytest.raises(InvalidPackageError, match="pairs of them make another one"):
        build_sentence_piece(
            tmp_path,
            tokenizer__ggml__tokens=["<unk>", "<s>", "</s>", *words],
            tokenizer__ggml__token_type=[2, 3, 3, *[1] * len(words)],
            tokenizer__ggml__scores=[0.0] * (3 + len(words)),
        )
