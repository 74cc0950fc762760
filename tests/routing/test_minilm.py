import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertModel

from expertctl.errors import InvalidPackageError
from expertctl.routing.encoder import find_minilm
from expertctl.routing.minilm import FILES, MAX_TOKENS, open_minilm
from expertctl.routing.vector_table import Vectors
from tests.routing.tiny_bert import VOCABULARY, make_word_piece_tokenizer, write_tiny_bert

TEXTS = [
    "a",
    "a b c d e f",
    "the quick brown fox",
    "x " * 400,
    "  ",
    "Zürich, naïve? 日本 \U0001f600",
    "b a",
]
MINILM = find_minilm()


def reference(directory: Path, texts: list[str]) -> Vectors:
    """The model as its authors describe it: transformers, mean pooling, unit length."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    model = BertModel.from_pretrained(directory, dtype=torch.float32)  # in evaluation mode
    rows = []
    with torch.no_grad():
        for text in texts:  # one by one: padding must not matter
            ids = torch.tensor([tokenizer.encode(text).ids])
            mean = model(input_ids=ids).last_hidden_state.mean(1)
            rows.append(torch.nn.functional.normalize(mean)[0])
    result: Vectors = torch.stack(rows).numpy()
    return result


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_bert(tmp_path / "tiny")


def test_the_numpy_bert_equals_transformers(tiny: Path) -> None:
    encoder = open_minilm(tiny)
    rows = encoder.encode(TEXTS)
    assert rows.shape == (len(TEXTS), 32) == (len(TEXTS), encoder.dimensions)
    assert np.abs(rows - reference(tiny, TEXTS)).max() < 1e-5


def test_batches_do_not_change_a_vector(tiny: Path) -> None:
    encoder = open_minilm(tiny)
    texts = [f"{'a ' * (i % 7)} word number {'x' * i}" for i in range(70)]
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    assert encoder.encode([]).shape == (0, 32)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 1e-5), (torch.bfloat16, 1e-5), (torch.float64, 1e-5)]
)
def test_other_float_types_are_widened_or_narrowed(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    directory = write_tiny_bert(tmp_path / "typed", dtype=dtype)
    error = np.abs(open_minilm(directory).encode(TEXTS) - reference(directory, TEXTS)).max()
    assert error < tolerance


def test_weights_named_as_a_part_of_a_larger_model_are_found(tiny: Path) -> None:
    before = open_minilm(tiny).encode(["a b"])
    tensors = load_file(tiny / "model.safetensors")
    save_file({f"bert.{name}": t for name, t in tensors.items()}, tiny / "model.safetensors")
    assert np.array_equal(open_minilm(tiny).encode(["a b"]), before)


def test_the_digest_changes_with_the_weights_and_the_stamp_with_the_file(tmp_path: Path) -> None:
    one, two = write_tiny_bert(tmp_path / "one"), write_tiny_bert(tmp_path / "two", seed=1)
    same = write_tiny_bert(tmp_path / "same")
    assert open_minilm(one).digest() == open_minilm(same).digest() != open_minilm(two).digest()
    assert len({open_minilm(d).stamp for d in (one, two, same)}) == 3
    assert open_minilm(one).stamp == open_minilm(one).stamp


def test_similarities_of_a_trained_model_are_taken_as_they_are(tiny: Path) -> None:
    cosines = np.array([-1, 0, 0.6, 1], np.float32)
    assert np.array_equal(open_minilm(tiny).calibrate(cosines), cosines)


@contextmanager
def edited_config(directory: Path) -> Iterator[dict[str, Any]]:
    document = json.loads((directory / "config.json").read_text())
    yield document
    (directory / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "roberta", "only 'bert'"),
        ("hidden_act", "gelu_new", "only 'gelu'"),
        ("position_embedding_type", "relative_key", "absolute"),
        ("hidden_size", 10**12, "hidden_size"),
        ("hidden_size", "32", "hidden_size"),
        ("num_hidden_layers", True, "num_hidden_layers"),
        ("num_hidden_layers", 3, "encoder.layer.2"),
        ("num_attention_heads", 5, "multiple"),
        ("intermediate_size", 47, "encoder.layer.0.intermediate"),
        ("layer_norm_eps", -1.0, "layer_norm_eps"),
        ("vocab_size", 10, "embeddings.word_embeddings"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    tiny: Path, key: str, value: object, message: str
) -> None:
    with edited_config(tiny) as document:
        document[key] = value
    with pytest.raises(InvalidPackageError, match=message):
        open_minilm(tiny)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04pickle", b"[" * 100000])
def test_damaged_files_are_refused(tiny: Path, name: str, data: bytes) -> None:
    (tiny / name).write_bytes(data)
    with pytest.raises(InvalidPackageError):
        open_minilm(tiny)


def test_a_tokenizer_of_another_model_is_refused(tiny: Path) -> None:
    many = [*VOCABULARY, *(f"w{i}" for i in range(500))]
    (tiny / "tokenizer.json").write_text(json.dumps(make_word_piece_tokenizer(many)))
    with pytest.raises(InvalidPackageError, match="more tokens"):
        open_minilm(tiny)


@pytest.mark.skipif(MINILM is None, reason="all-MiniLM-L6-v2 is not on this machine")
def test_the_real_model_equals_the_reference() -> None:
    assert MINILM is not None
    texts = [*TEXTS, "Sort these numbers: 41, 7, 23", "What is the capital of France?"]
    rows = open_minilm(MINILM).encode(texts)
    assert rows.shape[1] == 384
    assert np.abs(rows - reference(MINILM, texts)).max() < 1e-4


@pytest.mark.skipif(MINILM is None, reason="all-MiniLM-L6-v2 is not on this machine")
def test_the_real_tokenizer_reads_as_transformers_does() -> None:
    assert MINILM is not None
    ours = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    ours.no_padding()
    ours.no_truncation()
    theirs = AutoTokenizer.from_pretrained(MINILM)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]


def reference_deep(directory: Path, texts: list[str]) -> Vectors:
    """The three views as transformers computes them, side by side."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    model = BertModel.from_pretrained(directory, dtype=torch.float32)
    context: list[torch.Tensor] = []
    layers: Any = model.encoder.layer
    layers[-2].attention.output.dense.register_forward_pre_hook(
        lambda _, inputs: context.append(inputs[0])
    )
    rows = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
            views = (states[-1], context[-1], states[0])
            units = [torch.nn.functional.normalize(view.mean(1))[0] for view in views]
            rows.append(torch.cat(units) / 3**0.5)
    result: Vectors = torch.stack(rows).numpy()
    return result


def test_a_deep_row_is_made_of_three_views(tiny: Path) -> None:
    encoder = open_minilm(tiny)
    encoded = encoder.encode_for_rerank(TEXTS)
    assert encoded.rerank_rows.shape == (len(TEXTS), 96) == (len(TEXTS), encoder.rerank_dimensions)
    assert np.abs(encoded.rerank_rows - reference_deep(tiny, TEXTS)).max() < 1e-5
    assert np.allclose(np.linalg.norm(encoded.rerank_rows, axis=1), 1, atol=1e-5)
    assert np.array_equal(encoded.rows, encoder.encode(TEXTS))
    assert encoder.encode_for_rerank([]).rerank_rows.shape == (0, 96)


def test_a_model_of_one_layer_has_its_views_too(tiny: Path) -> None:
    with edited_config(tiny) as document:
        document["num_hidden_layers"] = 1
    encoded = open_minilm(tiny).encode_for_rerank(TEXTS)
    assert np.allclose(np.linalg.norm(encoded.rerank_rows, axis=1), 1, atol=1e-5)
    assert np.abs(encoded.rows - reference(tiny, TEXTS)).max() < 1e-5


@pytest.mark.skipif(MINILM is None, reason="all-MiniLM-L6-v2 is not on this machine")
def test_the_deep_rows_of_the_real_model_equal_the_reference() -> None:
    assert MINILM is not None
    deep = open_minilm(MINILM).encode_for_rerank(TEXTS).rerank_rows
    assert np.abs(deep - reference_deep(MINILM, TEXTS)).max() < 1e-4
