"""What one package can do to what is enough for all others."""

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.calibration import CalibrationEvidence, collect_evidence
from expertctl.routing.vector_search import find_nearest_exact
from expertctl.routing.vector_table import SearchHits, Vectors, VectorTable
from tests.routing.vector_tables import DIMENSIONS, TEXTS, make_clusters, make_expert_digest

HOSTILE = 200


def asked_again(table: VectorTable) -> CalibrationEvidence:
    def search(query: Vectors) -> SearchHits:
        return find_nearest_exact(table, query, count=64)

    return collect_evidence(table, table, search)


def test_a_package_of_200_examples_is_asked_no_oftener_than_the_others() -> None:
    table, row = make_clusters(6), np.zeros((1, DIMENSIONS), np.float32)
    row[0, 0] = 1
    hostile = table.add_entries({Digest.compute(b"hostile"): np.repeat(row, 1 + HOSTILE, axis=0)})
    assert len(asked_again(table).outside) == 6 * (TEXTS - 1)
    assert len(asked_again(hostile).outside) == 7 * (TEXTS - 1)


def test_where_most_have_one_example_no_package_brings_more_than_five() -> None:
    few = make_clusters(6)
    rows = {make_expert_digest(n): few.rows[few.starts[n] :][: 2 if n else TEXTS] for n in range(6)}
    table = VectorTable.empty(encoder=few.encoder, stamp="s", dimensions=DIMENSIONS)
    assert len(asked_again(table.add_entries(rows)).outside) == 5 * 1 + 5


def test_a_copy_of_every_expert_changes_little_of_what_is_enough() -> None:
    once = make_clusters(6)
    copies = {
        make_expert_digest(n, name="copy"): once.rows[once.select_rows(np.array([n]))]
        for n in range(6)
    }
    alone, twice = asked_again(once), asked_again(once.add_entries(copies))
    for share in (0.03, 0.5, 0.97):
        pairs = ((alone.inside, twice.inside), (alone.outside, twice.outside))
        for one, two in pairs:
            assert abs(np.quantile(one, share) - np.quantile(two, share)) < 0.1


def test_what_has_no_rows_for_the_head_is_neither_asked_nor_compared() -> None:
    table = make_clusters(6)
    deep = table.mark_dead(np.array([5])).compact()

    def search(query: Vectors) -> SearchHits:
        return find_nearest_exact(table, query, count=64)

    without = collect_evidence(table, deep, search)
    known = collect_evidence(deep, deep, lambda query: find_nearest_exact(deep, query, count=64))
    assert len(without.outside) == 5 * (TEXTS - 1)
    assert np.allclose(without.outside, known.outside, atol=1e-6)
