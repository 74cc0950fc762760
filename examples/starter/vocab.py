"""The byte-level tokenizer and the chat template of the starter base.

Token ids 0-255 are the bytes themselves, so any UTF-8 text round-trips. The three specials follow;
the rest up to `SIZE` is unused padding. `tokenizer.json` holds a BPE model without merges, which
is the same thing said in the Hugging Face format.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIALS = {END_OF_TEXT: 256, START: 257, END: 258}
SIZE = 264
MAX_LENGTH = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def encode_prompt(prompt: str, *, system: str | None = None) -> list[int]:
    """The token ids of one user turn, up to where the assistant starts to speak."""
    preamble = [] if system is None else encode_system(system)
    return [*preamble, *_turn("user", prompt), *b"\n", SPECIALS[START], *b"assistant\n"]


def encode_system(text: str) -> list[int]:
    """The token ids of a system turn, up to where the user's turn starts."""
    return [*_turn("system", text), *b"\n"]


def encode_answer(answer: str) -> list[int]:
    """The token ids of an answer, with the token that ends it."""
    return [*answer.encode(), SPECIALS[END]]


def decode_answer(ids: list[int]) -> str:
    """The text of generated ids up to the first special token."""
    end = next((index for index, token in enumerate(ids) if token > 255), len(ids))
    return bytes(ids[:end]).decode(errors="replace")


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "generation_config.json", _generation_config())


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer without merges, so that one byte is one token."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def _turn(role: str, text: str) -> list[int]:
    return [SPECIALS[START], *role.encode(), *b"\n", *text.encode(), SPECIALS[END]]


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _generation_config() -> dict[str, object]:
    return {
        "do_sample": False,
        "eos_token_id": [SPECIALS[END], SPECIALS[END_OF_TEXT]],
        "pad_token_id": SPECIALS[END_OF_TEXT],
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
