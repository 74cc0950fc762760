"""What vectors tell about copies and grab-alls, on rows whose cosines are known."""

import numpy as np
import pytest

from expertctl.reference import Digest
from expertctl.routing.vector_table import Mask, Vectors, VectorTable
from expertctl.routing.vetting import PackageRows, find_near_duplicates
from expertctl.store.preference import Flag

SIZE = 64


class CalibratedEncoder:
    """An encoder of which only the calibration is asked."""

    dimensions, deep_dimensions, stamp = SIZE, SIZE, "plain"

    def __init__(self, name: str = "minilm") -> None:
        self.name = name

    def calibrate(self, cosines: Vectors) -> Vectors:
        return cosines


def axis(*places: int) -> Vectors:
    """Unit rows along these axes."""
    return np.eye(SIZE, dtype=np.float32)[list(places)]


def leaning(rows: Vectors, cosine: float) -> Vectors:
    """Unit rows with this cosine to others, each away along an axis of its own."""
    away = np.eye(SIZE, dtype=np.float32)[SIZE - len(rows) :]
    return np.float32(cosine) * rows + np.float32(np.sqrt(1 - cosine**2)) * away


ABOUT = np.full(SIZE, SIZE**-0.5, np.float32)
"""A description that is a little like everything."""


def others(*entries: Vectors) -> VectorTable:
    digest = Digest.compute(b"encoder")
    empty = VectorTable.empty(encoder=digest, stamp="plain", dimensions=SIZE)
    return empty.add_entries({Digest.compute(bytes([n])): rows for n, rows in enumerate(entries)})


def found(
    table: VectorTable,
    examples: Vectors,
    mask: Mask | None = None,
    *,
    description: Vectors = ABOUT,
    encoder: str = "minilm",
) -> list[Flag]:
    everybody = np.ones(len(table), np.bool_) if mask is None else mask
    told = PackageRows(description, examples)
    return list(
        find_near_duplicates(
            table,
            told,
            others=everybody,
            name="expert {}".format,
            encoder=CalibratedEncoder(encoder),
        )  # type: ignore[arg-type]  # only what is asked
    )


def test_attack_105_examples_in_other_words_are_flagged() -> None:
    table = others(axis(0, 1), axis(10, 11, 12, 13, 14))
    (flag,) = found(table, leaning(axis(10, 11, 12, 13, 14), 0.95))
    assert (flag.code, flag.other) == ("near-copy", "expert 1")
    assert flag.sentence == "5 of 5 examples say in other words what those of expert 1 say"


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.89])
def test_what_is_only_similar_is_no_copy(cosine: float) -> None:
    assert found(others(axis(0, 1, 2)), leaning(axis(0, 1, 2), cosine)) == []


def test_a_few_near_examples_are_no_copy() -> None:
    examples = np.concatenate([leaning(axis(0), 0.95), axis(20, 21, 22)])
    assert found(others(axis(0, 1, 2)), examples) == []


def test_attack_105_a_catch_all_is_flagged() -> None:
    table = others(*(axis(n) for n in range(6)))
    (flag,) = found(table, leaning(axis(0, 1, 2, 3, 4, 5), 0.7))
    assert (flag.code, flag.other) == ("grab-all", None)


def test_examples_that_have_something_in_common_are_no_catch_all() -> None:
    table = others(*(axis(n) for n in range(6)))
    examples = axis(0, 1, 2, 3, 4, 5) + axis(30)
    assert found(table, examples / np.linalg.norm(examples, axis=1, keepdims=True)) == []


def test_examples_that_resemble_few_others_are_no_catch_all() -> None:
    table = others(axis(0, 1, 2), axis(3, 4, 5))
    assert found(table, leaning(axis(0, 1, 2, 3, 4, 5), 0.7)) == []


@pytest.mark.parametrize("encoder", ["lexical", "static"])
def test_an_encoder_that_sees_words_alone_sees_no_catch_all(encoder: str) -> None:
    table = others(*(axis(n) for n in range(10)))
    everything = leaning(axis(*range(10)), 0.7)
    assert [flag.code for flag in found(table, everything)] == ["grab-all"]
    assert found(table, everything, encoder=encoder) == []


def test_attack_105_examples_about_everything_are_flagged_where_nobody_else_is() -> None:
    (flag,) = found(others(axis(60)), axis(*range(10)), description=axis(61)[0])
    told = "its examples have little in common with each other and with its description"
    assert (flag.code, flag.sentence, flag.other) == ("grab-all", told, None)
    assert found(others(), axis(*range(10)), description=axis(61)[0]) == [flag]


@pytest.mark.parametrize("cosine", [0.15, 0.3])
def test_a_wide_field_that_its_description_names_is_no_catch_all(cosine: float) -> None:
    examples = axis(*range(20))
    about = axis(*range(20)).sum(0) * np.float32(cosine) + axis(61)[0]
    about /= np.linalg.norm(about)
    assert found(others(axis(60)), examples, description=about) == []


def test_a_few_unrelated_examples_are_no_catch_all() -> None:
    assert found(others(axis(60)), axis(*range(9)), description=axis(61)[0]) == []


def test_examples_near_each_other_may_be_far_from_their_description() -> None:
    examples = axis(*range(10)) + axis(30)
    examples /= np.linalg.norm(examples, axis=1, keepdims=True)
    assert found(others(axis(60)), examples, description=axis(61)[0]) == []


def test_those_that_do_not_count_are_passed_over() -> None:
    table = others(axis(0, 1, 2))
    assert found(table, axis(0, 1, 2), np.zeros(1, np.bool_)) == []


def test_one_example_alone_tells_nothing() -> None:
    assert found(others(axis(0)), axis(0)) == []


def test_many_rows_are_compared_in_parts() -> None:
    filler = np.tile(axis(40), (40_000, 1))
    table = others(axis(0, 1, 2), filler, axis(3, 4, 5))
    (flag,) = found(table, leaning(axis(3, 4, 5), 0.95))
    assert flag.other == "expert 2"
