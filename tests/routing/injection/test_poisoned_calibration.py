"""What one package can do to what is enough for all others."""

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.calibration import Evidence, ask_again
from expertctl.routing.found import Found
from expertctl.routing.nearest import exactly
from expertctl.routing.vector_table import Vectors, VectorTable
from tests.routing.rows import DIMENSIONS, TEXTS, clusters, expert

HOSTILE = 200


def asked_again(table: VectorTable) -> Evidence:
    def search(query: Vectors) -> Found:
        return exactly(table, query, count=64)

    return ask_again(table, table, search)


def test_a_package_of_200_examples_is_asked_no_oftener_than_the_others() -> None:
    table, row = clusters(6), np.zeros((1, DIMENSIONS), np.float32)
    row[0, 0] = 1
    hostile = table.with_entries({Digest.of(b"hostile"): np.repeat(row, 1 + HOSTILE, axis=0)})
    assert len(asked_again(table).outside) == 6 * (TEXTS - 1)
    assert len(asked_again(hostile).outside) == 7 * (TEXTS - 1)


def test_where_most_have_one_example_no_package_brings_more_than_five() -> None:
    few = clusters(6)
    rows = {expert(n): few.rows[few.starts[n] :][: 2 if n else TEXTS] for n in range(6)}
    table = VectorTable.empty(encoder=few.encoder, stamp="s", dimensions=DIMENSIONS)
    assert len(asked_again(table.with_entries(rows)).outside) == 5 * 1 + 5


def test_a_copy_of_every_expert_changes_little_of_what_is_enough() -> None:
    once = clusters(6)
    copies = {expert(n, name="copy"): once.rows[once.rows_of(np.array([n]))] for n in range(6)}
    alone, twice = asked_again(once), asked_again(once.with_entries(copies))
    for share in (0.03, 0.5, 0.97):
        pairs = ((alone.inside, twice.inside), (alone.outside, twice.outside))
        for one, two in pairs:
            assert abs(np.quantile(one, share) - np.quantile(two, share)) < 0.1


def test_what_has_no_rows_for_the_head_is_neither_asked_nor_compared() -> None:
    table = clusters(6)
    deep = table.without(np.array([5])).compact()

    def search(query: Vectors) -> Found:
        return exactly(table, query, count=64)

    without = ask_again(table, deep, search)
    known = ask_again(deep, deep, lambda query: exactly(deep, query, count=64))
    assert len(without.outside) == 5 * (TEXTS - 1)
    assert np.allclose(without.outside, known.outside, atol=1e-6)
