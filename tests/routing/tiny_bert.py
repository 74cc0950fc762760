"""A tiny random BERT in the files of all-MiniLM-L6-v2, written by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]


def write_tiny_bert(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A random BERT with the names and files of the real model."""
    directory.mkdir(parents=True)
    config = BertConfig(
        vocab_size=len(VOCABULARY) + 26,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=300,
        layer_norm_eps=1e-12,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    model: Any = BertModel(config)
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    document = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**document, "model_type": "bert"}))
    pieces = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (directory / "tokenizer.json").write_text(
        json.dumps(make_word_piece_tokenizer([*VOCABULARY, *pieces]))
    )
    return directory


def make_word_piece_tokenizer(vocabulary: list[str]) -> dict[str, Any]:
    """A BERT tokenizer that truncates and pads, as the published file does."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    template = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]
    template += [{"Sequence": {"id": "A", "type_id": 0}}]
    template += [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}]
    specials = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in ("[CLS]", "[SEP]")}
    return {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 128,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 128},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": specials,
        },
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
