from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from expertctl.reference import Digest
from expertctl.routing.static_encoder import (
    TABLE,
    TOKENIZER,
    StaticTable,
    derive_rows,
    read_static_table,
    write_static_table,
)
from tests.routing.tiny_bert import VOCABULARY, write_tiny_bert

SOURCE = Digest.compute(b"model")


def table_of(rows: object, tokenizer: bytes = b"{}") -> StaticTable:
    return StaticTable.build(np.array(rows, np.float16), tokenizer, source=SOURCE, stamp="here")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(write_tiny_bert(tmp_path / "tiny") / TOKENIZER))


def test_rows_keep_the_angles_of_the_centred_embeddings(tokenizer: Tokenizer) -> None:
    embeddings = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32) + 3
    rows = derive_rows(embeddings, tokenizer).astype(np.float32)
    assert rows.shape == (60, 8)
    ours = rows[10:] / np.linalg.norm(rows[10:], axis=1, keepdims=True)
    centred = (embeddings - embeddings.mean(0))[10:]
    expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    assert np.allclose(ours @ ours.T, expected @ expected.T, atol=2e-3)


def test_only_the_widest_axes_are_kept(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    embeddings = random.standard_normal((700, 300)).astype(np.float32)
    embeddings[:, 256:] *= 1e-3
    rows = derive_rows(embeddings, tokenizer).astype(np.float32)
    assert rows.shape == (700, 256)
    kept = rows[600] @ rows[601] / np.linalg.norm(rows[600]) / np.linalg.norm(rows[601])
    a, b = (embeddings - embeddings.mean(0))[[600, 601]]
    assert kept == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), abs=2e-3)


def test_rare_tokens_weigh_more_and_special_ones_nothing(tokenizer: Tokenizer) -> None:
    embeddings = np.tile(np.eye(2, dtype=np.float32), (500, 1))
    rows = derive_rows(embeddings, tokenizer).astype(np.float32)
    norms = np.linalg.norm(rows, axis=1)
    specials = [tokenizer.token_to_id(t) for t in VOCABULARY[:4]]
    assert (norms[specials] == 0).all()
    assert (np.diff(norms[4:]) >= 0).all()
    assert norms[-1] > 2 * norms[4]


def test_embeddings_that_are_all_alike_give_zeros(tokenizer: Tokenizer) -> None:
    rows = derive_rows(np.ones((30, 4), np.float32), tokenizer)
    assert not rows.any()


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "static"
    table = table_of([[1, 2], [3, 4]], b"tokens")
    write_static_table(folder, table)
    again = read_static_table(folder)
    assert again is not None
    assert np.array_equal(again.rows, table.rows)
    assert (again.tokenizer, again.digest) == (b"tokens", table.digest)
    assert (again.source, again.stamp) == (SOURCE, "here")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_the_digest_depends_on_numbers_shape_and_tokenizer_only() -> None:
    table = table_of([[1, 2], [3, 4]])
    others = [table_of([[1, 2], [3, 5]]), table_of([[1, 2, 3, 4]]), table_of([[1, 2], [3, 4]], b"")]
    assert len({table.digest, *(other.digest for other in others)}) == 4
    moved = StaticTable.build(table.rows, b"{}", source=Digest.compute(b"other"), stamp="there")
    assert moved.digest == table.digest


@pytest.mark.parametrize("name", [TABLE, TOKENIZER])
@pytest.mark.parametrize("data", [b"", b"\x80\x04pickle", b"\x02\0\0\0\0\0\0\0{}", None])
def test_a_damaged_or_absent_file_is_no_table(
    tmp_path: Path, name: str, data: bytes | None
) -> None:
    write_static_table(tmp_path, table_of([[1, 2]], b"tokens"))
    (tmp_path / name).unlink()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert read_static_table(tmp_path) is None


def test_one_changed_bit_is_noticed(tmp_path: Path) -> None:
    write_static_table(tmp_path, table_of([[1, 2], [3, 4]]))
    data = bytearray((tmp_path / TABLE).read_bytes())
    data[-1] ^= 1
    (tmp_path / TABLE).write_bytes(data)
    assert read_static_table(tmp_path) is None


@pytest.mark.parametrize("rows", [[[0.0] * 257], [1.0, 2.0], np.zeros((0, 3))])
def test_rows_of_another_shape_are_no_table(tmp_path: Path, rows: object) -> None:
    write_static_table(
        tmp_path, StaticTable(np.array(rows, np.float16), b"", SOURCE, SOURCE, "here")
    )
    assert read_static_table(tmp_path) is None


def test_a_table_of_another_format_is_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_static_table(tmp_path, table_of([[1, 2]]))
    monkeypatch.setattr("expertctl.routing.static_encoder.FORMAT", "2")
    assert read_static_table(tmp_path) is None
