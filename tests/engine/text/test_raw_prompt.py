"""Prompts that no chat template reads, as tokens: control tokens, the beginning, suffixes.

The expected tokens are those that transformers makes of the text that a family documents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from expertctl.engine.text.chat_template import encode_raw_prompt, find_fim_tokens
from expertctl.engine.text.prompt import RawPrompt
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.text.tokenizer_files import TokenizerConfig
from expertctl.errors import UsageError
from tests.factories import byte_alphabet

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))  # <|im_end|>\n"


def byte_level(*added: str, special: bool = True, bos: str | None = None) -> Backend:
    """A byte-level tokenizer like those of GPT-2, Qwen and StarCoder."""
    alphabet = byte_alphabet()
    merges = [("Ġ", "Ġ"), ("r", "e"), ("Ċ", "Ċ")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in added])
    if bos is not None:
        with_begin(backend, bos)
    return backend


def sentencepiece(*added: str) -> Backend:
    """A tokenizer like Llama's: a space before a text, bytes for what it does not know."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    merges = [("▁", "d"), ("▁", "r"), ("r", "e")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>", *added])
    with_begin(backend, "<s>")
    return backend


def with_begin(backend: Backend, bos: str) -> None:
    if backend.token_to_id(bos) is None:
        backend.add_special_tokens([bos])
    number = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )


def ours(backend: Backend) -> Tokenizer:
    config = TokenizerConfig(special_tokens={}, end_ids=(), template=None)
    return Tokenizer(backend, config)


def theirs(backend: Backend, text: str, folder: Path) -> tuple[int, ...]:
    """What transformers makes of a text with this tokenizer.json."""
    file = folder / "tokenizer.json"
    backend.save(str(file))
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    return tuple(fast(text).input_ids)


def read(tokenizer: Tokenizer, text: str = "", **options: Any) -> tuple[int, ...]:
    return encode_raw_prompt(tokenizer, RawPrompt(text=text, **options)).ids


QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
SANTACODER = ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001 - their letters


@pytest.mark.parametrize(
    ("names", "special", "bos"),
    [
        (QWEN, False, None),
        (QWEN, True, "<bos>"),  # as CodeGemma has them
        (STARCODER, True, None),
        (SANTACODER, True, None),
        (DEEPSEEK, False, "<｜begin▁of▁sentence｜>"),  # noqa: RUF001 - their letters
    ],
    ids=["Qwen2.5-Coder", "CodeGemma", "StarCoder", "SantaCoder", "DeepSeek-Coder"],
)
def test_a_suffix_stands_where_the_family_of_the_base_documents_it(
    names: Sequence[str], special: bool, bos: str | None, tmp_path: Path
) -> None:
    backend = byte_level(*names, special=special, bos=bos)
    suffix = SUFFIX.replace("<|im_end|>", "")
    documented = f"{names[0]}{PREFIX}{names[1]}{suffix}{names[2]}"
    found = read(ours(backend), PREFIX, suffix=suffix)
    assert found == theirs(backend, documented, tmp_path)


def test_a_suffix_for_codellama_has_no_space_before_it(tmp_path: Path) -> None:
    """As CodeLlama documents it: the prefix begins a text; the suffix is read behind a letter."""
    backend = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    pre, suf, mid = (backend.token_to_id(name) for name in ("▁<PRE>", "▁<SUF>", "▁<MID>"))
    prefix = backend.encode("def f", add_special_tokens=False).ids
    face = backend.encode("☺", add_special_tokens=False).ids
    suffix = backend.encode("☺return x\n", add_special_tokens=False).ids[len(face) :]
    [bos] = [backend.token_to_id("<s>")]
    found = read(ours(backend), "def f", suffix="return x\n")
    assert found == (bos, pre, *prefix, suf, *suffix, mid)
    assert backend.id_to_token(suffix[0]) == "re"
    assert backend.id_to_token(prefix[0]) == "▁d"


def test_a_suffix_for_codestral_comes_first(tmp_path: Path) -> None:
    backend = sentencepiece("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    prefix = backend.encode("def f", add_special_tokens=False).ids
    found = read(ours(backend), "def f", suffix="re")
    names = [backend.id_to_token(one) for one in found]
    assert names == ["<s>", "[SUFFIX]", "re", "[PREFIX]", *map(backend.id_to_token, prefix)]


def test_letters_of_a_file_are_letters_beside_a_suffix(tmp_path: Path) -> None:
    backend = byte_level(*QWEN, special=False)
    end = backend.token_to_id("<|im_end|>")
    letters = read(ours(backend), PREFIX, suffix=SUFFIX, parse_special=False)
    assert end not in letters
    assert backend.decode(letters, skip_special_tokens=False).endswith(f"{SUFFIX}<|fim_middle|>")
    assert end in read(ours(backend), PREFIX, suffix=SUFFIX, parse_special=True)


def test_a_file_that_begins_at_the_middle_has_an_empty_prefix(tmp_path: Path) -> None:
    backend = byte_level(*QWEN)
    found = read(ours(backend), "", suffix="re")
    assert found == theirs(backend, "<|fim_prefix|><|fim_suffix|>re<|fim_middle|>", tmp_path)


def test_the_middle_ends_where_another_file_would_begin() -> None:
    backend = byte_level(*QWEN, special=False)
    prompt = encode_raw_prompt(ours(backend), RawPrompt(text="a", suffix="b"))
    assert prompt.end_ids == {backend.token_to_id(name) for name in QWEN}
    assert encode_raw_prompt(ours(backend), RawPrompt(text="a")).end_ids == frozenset()


@pytest.mark.parametrize("names", [(), QWEN[:2], ("<fim_prefix>", *QWEN[1:])], ids=str)
def test_a_base_without_all_tokens_of_a_family_takes_no_suffix(names: Sequence[str]) -> None:
    tokenizer = ours(byte_level(*names))
    assert find_fim_tokens(tokenizer) is None
    with pytest.raises(UsageError, match="no fill-in-the-middle tokens"):
        read(tokenizer, "a", suffix="b")


RENDERED = "<|im_end|>a <|im_end|>\n"


def test_control_tokens_in_a_text_are_those_of_transformers(tmp_path: Path) -> None:
    backend = byte_level()
    assert read(ours(backend), RENDERED) == theirs(backend, RENDERED, tmp_path)


def test_control_tokens_in_a_text_can_be_read_as_letters() -> None:
    backend = byte_level()
    found = read(ours(backend), RENDERED, parse_special=False)
    assert backend.token_to_id("<|im_end|>") not in found
    assert backend.decode(found) == RENDERED


@pytest.mark.parametrize("text", ["<s>def f", "def f", "<s>", "<s> <s>"])
def test_a_text_begins_with_one_begin_token_however_it_is_written(text: str) -> None:
    backend = sentencepiece()
    begin = backend.token_to_id("<s>")
    found = read(ours(backend), text)
    assert found[0] == begin
    assert found[1:2] != (begin,)
    assert found[1:] == tuple(
        backend.encode(text.removeprefix("<s>"), add_special_tokens=False).ids
    )


def test_no_token_is_added_to_tokens_or_where_that_is_asked_for() -> None:
    backend = sentencepiece()
    tokenizer = ours(backend)
    assert read(tokenizer, ids=(5, 6)) == (5, 6)
    plain = tuple(backend.encode("def f", add_special_tokens=False).ids)
    assert read(tokenizer, "def f", add_special_tokens=False) == plain
    letters = read(tokenizer, "def f", add_special_tokens=False, parse_special=False)
    assert letters == plain


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        read(ours(byte_level()), "", add_special_tokens=False)


def test_a_token_is_spelled_alone_as_the_published_api_does() -> None:
    backend = byte_level()
    tokenizer = ours(backend)
    face = backend.encode("🙂a<|im_end|>").ids
    assert [tokenizer.token_text(one) for one in face] == [
        *("bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"),
        "a",
        "<|im_end|>",
    ]
    llama = sentencepiece()
    ids = llama.encode("def é", add_special_tokens=False).ids
    spelled = [ours(llama).token_text(one) for one in ids]
    assert spelled == [" d", "e", "f", " ", "bytes:\\xc3", "bytes:\\xa9"]
