"""What figures of a bench come to, beside the formula; and what makes them worth less."""

from dataclasses import replace

import pytest

from expertctl.engine.bench_result import CACHE_BYTES, BenchResult, ModelCosts, Spread, TimingSeries
from tests.benchmarks.test_gguf import small_config

LARGE = 200_000_000


def series(*seconds: float) -> TimingSeries:
    return TimingSeries(tuple((each,) for each in seconds))


def measured(**changes: object) -> BenchResult:
    """Memory gives 1 and 2 GB/s, arithmetic 10 and 20 GFLOP/s, with one thread and with two."""
    costs = ModelCosts(
        config=small_config(), layer_bytes=LARGE - 1_000_000, head_bytes=1_000_000, kv_itemsize=4
    )
    plain = BenchResult(
        what="a base",
        cpu="a processor",
        dtype="bfloat16",
        costs=costs,
        chunk=512,
        context=9,
        virtual=0,
        read_bytes=LARGE,
        memory={1: series(0.2, 0.2), 2: series(0.1, 0.1)},
        arithmetic={1: series(0.1, 0.1), 2: series(0.05, 0.05)},
        arithmetic_operations={1: 10**9, 2: 10**9},
        tokens={1: series(0.25, 0.25), 2: series(0.125, 0.125)},
        prompts={64: series(0.4, 0.4)},
    )
    return replace(plain, **changes)


def test_quartiles_lie_between_the_figures() -> None:
    assert Spread.from_figures([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25)
    assert Spread.from_figures([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_token_reaches_the_share_of_memory_that_its_bytes_say() -> None:
    found = measured()
    work = found.costs.decode_work(9)
    for threads, seconds in ((1, 0.25), (2, 0.125)):
        reach = found.decode_share(threads)
        assert reach.bound == "memory"
        expected = work.nbytes / seconds / (threads * 1e9)
        assert reach.share.median == pytest.approx(expected)
    rows = {(row.case, row.threads): row for row in found.rows}
    assert rows["memory", 2].rate.median == pytest.approx(2.0)
    assert rows["arithmetic", 1].rate.median == pytest.approx(10.0)
    assert rows["write", 2].rate.median == pytest.approx(8.0)
    assert rows["write", 2].roof == pytest.approx(2e9 / work.nbytes)


def test_a_share_is_of_the_roof_of_its_own_round() -> None:
    slower = {1: series(0.2, 0.4), 2: series(0.1, 0.2)}  # the machine halves in the second round
    tokens = {1: series(0.25, 0.5), 2: series(0.125, 0.25)}
    share = measured(memory=slower, tokens=tokens).decode_share(1).share
    assert share.low == pytest.approx(share.high)
    assert share.median == pytest.approx(measured().decode_share(1).share.median)


def test_a_prompt_is_bound_by_arithmetic_where_it_computes_enough() -> None:
    small = replace(measured().costs, layer_bytes=100_000, head_bytes=10_000)
    found = measured(costs=small, virtual=3)
    work = small.prefill_work(67, chunk=512)
    assert work.intensity > found.make_roofline(2).ridge_intensity
    reach = found.prefill_share(64)
    assert reach.bound == "arithmetic"
    assert reach.share.median == pytest.approx(work.operations / 20e9 / 0.4)
    row = found.rows[-1]
    assert row.rate.median == pytest.approx(67 / 0.4)
    assert row.operations_per_s == pytest.approx(work.operations / 0.4)


def test_the_document_has_the_rows_of_a_benchmark() -> None:
    document = measured().to_json()
    assert document["name"] == "bench"
    assert document["machine"] == {"cpu": "a processor", "threads": 2, "device": "cpu"}
    rows = document["rows"]
    assert isinstance(rows, list)
    write = rows[4]
    assert isinstance(write, dict)
    assert write["case"] == "write, threads: 1"
    assert (write["ours"], write["unit"], write["better"]) == (4.0, "tokens/s", "higher")
    assert write["ratio"] == pytest.approx(
        float(str(write["ours"])) / float(str(write["theirs"])), abs=2e-3
    )
    assert write["bytes"] == measured().text_work().nbytes


def test_quiet_figures_need_no_note() -> None:
    assert measured().notes == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": {1: series(0.1, 0.2, 0.3), 2: series(0.1)}}, "decoding, threads: 1: the mid"),
        ({"arithmetic": {1: series(0.1), 2: series(0.09)}}, "2 threads compute 1.11 times as"),
        ({"warnings": ("an expert is unsigned",)}, "an expert is unsigned"),
    ],
)  # fmt: skip
def test_what_makes_figures_worth_less_is_told(changes: dict[str, object], told: str) -> None:
    [note] = measured(**changes).notes
    assert note.startswith(told)


def test_weights_that_fit_into_a_cache_are_told_of() -> None:
    small = replace(measured().costs, layer_bytes=CACHE_BYTES // 2)
    assert [note for note in measured(costs=small).notes if "caches of the processor" in note]
