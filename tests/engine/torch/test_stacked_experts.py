"""Routed experts in a stack, as on a device: the processor stands in its place."""

import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe import expert_cache
from expertctl.engine.moe.routed_experts import redistribute_weights
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graphs import PiecewiseStep
from expertctl.engine.torch.expert_stack import DUMMY_ROW, StackRowReader
from expertctl.engine.torch.stacked_experts import (
    StackedExperts,
    estimate_counter_bytes,
    estimate_lookup_bytes,
    redistribute_tensor_weights,
)
from expertctl.engine.torch.stacked_mlp import StackedMlp
from expertctl.errors import InvalidPackageError
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
    stack_logits,
)
from tests.engine.moe.fakes import install_fake_device, record_row_accesses
from tests.engine.reference_models import ROUTED_SHAPES
from tests.engine.torch.stacked_models import compute_scores, load_stacked_decoder, make_kv_cache

pytestmark = pytest.mark.all

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    return build_reference_model(tmp_path_factory.mktemp("olmoe") / "model", "olmoe", num_experts=8)


def loads(experts: StackedExperts) -> int:
    assert experts.cache is not None
    return experts.cache.activity().loads


@pytest.mark.parametrize(("arch", "config"), ROUTED_SHAPES)
def test_scores_are_those_of_transformers_wherever_experts_are(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel
) -> None:
    model = oracle(arch, **config)
    with load_stacked_decoder(model) as (decoder, experts):
        whole = compute_scores(decoder, IDS, prefill=9)
        experts.check_integrity()
    assert_same_logits(whole, model.compute_logits(IDS)[8:])
    for slots in (0, 2):
        with load_stacked_decoder(model, slots=slots) as (decoder, experts):
            for _ in range(2):
                assert torch.equal(compute_scores(decoder, IDS, prefill=9), whole)
                experts.check_integrity()
            assert loads(experts) > 0


def test_slots_that_change_all_the_time_change_no_bit(olmoe: ReferenceModel) -> None:
    def answer(slots: int | None) -> tuple[list[int], torch.Tensor]:
        with load_stacked_decoder(olmoe, slots=slots) as (decoder, experts):
            row = make_kv_cache(decoder).get_row(0)
            found = [decoder.prefill(IDS[:7], row, chunk=3).logits]
            while len(found) < 50:
                found.append(decoder.decode(int(found[-1].argmax()), row).logits)
                for layer in () if experts.cache is None else experts.cache.slots:
                    layer.counts[:] = 0.0  # who came last is worth most
            experts.check_integrity()
            if experts.cache is not None:
                assert experts.cache.activity().swaps > 5
        return [int(each.argmax()) for each in found], stack_logits(found)

    tokens, whole = answer(None)
    again, swapped = answer(2)
    assert again == tokens
    assert torch.equal(swapped, whole)


def test_in_bf16_they_are_the_same_bits_and_near_to_those_of_torch(olmoe: ReferenceModel) -> None:
    with load_stacked_decoder(olmoe, dtype=torch.bfloat16) as (decoder, _):
        whole = compute_scores(decoder, IDS, prefill=9)
    with load_stacked_decoder(olmoe, slots=2, dtype=torch.bfloat16) as (decoder, experts):
        assert torch.equal(compute_scores(decoder, IDS, prefill=9), whole)
        assert experts.stack.gate_up.dtype is torch.bfloat16
    theirs = olmoe.compute_logits(IDS)[8:]
    assert float((whole - theirs).norm() / theirs.norm()) <= 0.03


def test_what_is_on_its_way_is_in_no_row_until_somebody_waited(
    olmoe: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_come, read = threading.Event(), StackRowReader.read

    def late(self: StackRowReader, *arguments: Any, **options: Any) -> int:
        assert may_come.wait(60)
        return read(self, *arguments, **options)

    monkeypatch.setattr(StackRowReader, "read", late)
    with load_stacked_decoder(olmoe, slots=2) as (_, experts):
        selected = np.array([[3, 5, 1]])
        assert experts.request(2, selected, np.ones((1, 3), np.float32))
        found = experts.look_up(2, torch.from_numpy(selected))
        assert found.tolist() == [[DUMMY_ROW] * 3]
        may_come.set()
        experts.wait(2, 1)
        found = experts.look_up(2, torch.from_numpy(selected))
        assert DUMMY_ROW not in found
        assert len(set(found.flatten().tolist())) == 3
        assert int((experts.lookup != DUMMY_ROW).sum()) == 3
        experts.check_integrity()


def test_the_time_that_the_device_computes_is_not_waited_for_experts(
    olmoe: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device takes five seconds for who is there; who is missing comes in the meantime."""
    device, clock = install_fake_device(monkeypatch), [0.0]
    monkeypatch.setattr(expert_cache, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def compute() -> None:
        clock[0] += 5.0

    with load_stacked_decoder(olmoe, slots=2) as (_, experts):
        assert experts.cache is not None
        selected, weights = np.array([[3, 5, 1]]), np.ones((1, 3), np.float32)
        assert experts.request(2, selected, weights)
        device.launch(compute)
        experts.record_computed(2)
        experts.wait(2, 1)
        assert clock == [5.0]
        assert experts.cache.activity().waited_ms == 0.0
        experts.check_integrity()


def test_an_expert_comes_beside_work_that_cannot_read_who_was_in_its_row(
    olmoe: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, done = install_fake_device(monkeypatch), list[str]()
    with load_stacked_decoder(olmoe, slots=0) as (_, experts):
        assert experts.cache is not None
        assert len(experts.stack) == 8
        weights = np.ones((1, 3), np.float32)
        for chosen in ([0, 1, 2], [3, 4, 5]):
            assert experts.request(2, np.array([chosen]), weights)
            experts.wait(2, 1)
        before = set(experts.layer_rows(2).tolist()) - {DUMMY_ROW}
        device.launch(lambda: done.append("who reads them"))
        experts.record_computed(2)
        assert experts.request(1, np.array([[5, 6, 7]]), weights, likely=np.array([[3, 4, 5]]))
        device.launch(lambda: done.append("who cannot"))
        experts.record_computed(1)
        experts.cache.wait()
        assert before.intersection(experts.cache.places(1).tolist()), "one of them had to go"
        assert done == ["who reads them"]
        experts.stack.wait_for_reads()
        assert done == ["who reads them", "who cannot"]


@pytest.mark.parametrize("texts", [1, 3])
def test_where_all_are_there_as_many_are_counted_as_where_some_are_missing(
    texts: int, olmoe: ReferenceModel
) -> None:
    """Prompts and steps; what a padded batch reads besides is no text's."""
    found = []
    for slots in (None, 1):
        with load_stacked_decoder(olmoe, slots=slots) as (decoder, experts):
            arena = make_kv_cache(decoder, 4)
            rows = [arena.get_row(number) for number in range(texts)]
            for number, row in enumerate(rows):
                decoder.prefill(IDS[: 3 + number], row)
            for token in IDS[:6]:
                decoder.step([GraphStepRow((token + row.number) % 61, row) for row in rows])
            decoder.free_buffers()
            counter = experts.cache or experts.device_counts
            assert counter is not None
            found.append(counter.counters.cumulative_snapshot())
    whole, some = found
    assert np.array_equal(whole.expert_counts.sum(1), some.expert_counts.sum(1))
    assert whole.summary.requests == some.summary.requests > 0
    assert whole.summary.calls == some.summary.calls == 3 * (texts + 6)
    assert whole.summary.misses == whole.summary.missed_requests == 0


def test_who_asks_beside_gaps_is_counted_alone(olmoe: ReferenceModel) -> None:
    with load_stacked_decoder(olmoe) as (decoder, experts):
        arena = make_kv_cache(decoder, 4)
        decoder.step([GraphStepRow(3, arena.get_row(0)), GraphStepRow(9, arena.get_row(2))])
        decoder.free_buffers()
        assert experts.device_counts is not None
        assert (
            experts.device_counts.counters.cumulative_snapshot().summary.hits
            == 2 * 3 * experts.config.used
        )


def test_nothing_moves_while_experts_come_and_go(olmoe: ReferenceModel) -> None:
    with load_stacked_decoder(olmoe, slots=2) as (decoder, experts):
        stack = experts.stack
        before = [tensor.data_ptr() for tensor in (stack.gate_up, stack.down, experts.lookup)]
        compute_scores(decoder, IDS, prefill=3)
        after = [tensor.data_ptr() for tensor in (stack.gate_up, stack.down, experts.lookup)]
        assert after == before


def test_bytes_are_those_of_blocks_the_dummy_and_the_lookup(olmoe: ReferenceModel) -> None:
    one = 3 * 32 * 48 * 4  # hidden 32, intermediate 48, float32
    with load_stacked_decoder(olmoe) as (_, experts):
        counts = estimate_counter_bytes(experts.config)
        assert counts == 8 * (3 * 8 + 2 * 3 + 1)
        assert experts.nbytes == (3 * 8 + 1) * one + estimate_lookup_bytes(experts.config) + counts
    with load_stacked_decoder(olmoe, slots=3) as (_, experts):
        assert experts.nbytes == (3 * 3 + 8 - 3 + 1) * one + 3 * 8 * 8


def test_a_file_that_is_cut_short_is_told_and_the_next_text_is_refused_too(
    oracle: MakeReferenceModel,
) -> None:
    model = oracle("olmoe")
    with load_stacked_decoder(model, slots=1) as (decoder, experts):
        file = model.directory / "model.safetensors"
        whole = file.rename(file.with_suffix(".whole"))  # what is mapped of it stays
        file.write_bytes(whole.read_bytes()[:5000])
        for _ in range(2):
            with pytest.raises(InvalidPackageError, match="changed while"):
                compute_scores(decoder, IDS, prefill=3)
        assert experts.cache is not None
        wait(coming.future for coming in experts.cache._loader._pending.values())
        whole.replace(file)
        assert_same_logits(compute_scores(decoder, IDS, prefill=3), model.compute_logits(IDS)[2:])
        experts.check_integrity()


def test_a_file_that_is_cut_short_is_told_where_all_are_brought(oracle: MakeReferenceModel) -> None:
    model = oracle("olmoe")
    file = model.directory / "model.safetensors"
    with load_stacked_decoder(model) as (_, experts):
        whole = file.rename(file.with_suffix(".whole"))  # what is mapped of it stays
        file.write_bytes(whole.read_bytes()[:5000])
        with pytest.raises(InvalidPackageError, match="changed while"):
            experts.load_all()


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 8))
def test_weights_that_are_kept_are_those_of_the_plain_formula(
    seed: int, tokens: int, used: int
) -> None:
    drawn = np.random.default_rng(seed)
    weights = drawn.random((tokens, used), np.float32)
    hits = drawn.random((tokens, used)) < drawn.random()
    found = redistribute_tensor_weights(torch.from_numpy(weights), torch.from_numpy(hits)).numpy()
    np.testing.assert_array_equal(found, redistribute_weights(weights, hits))
    assert not found[~hits].any()
    assert (found[hits.all(-1)] == weights[hits.all(-1)]).all()


def test_weights_that_are_kept_in_numbers() -> None:
    """Of 0.5, 0.3 and 0.2 the second is missed: the others share its 0.3 as 5 to 2."""
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    hits = torch.tensor([[True, False, True], [False, False, False]])
    found = redistribute_tensor_weights(weights, hits)
    assert found[0].tolist() == pytest.approx([5 / 7, 0.0, 2 / 7])
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_an_expert_of_a_layer_is_read_from_stacks_and_from_matrices_apart(
    olmoe: ReferenceModel, tmp_path: Path
) -> None:
    together = ReferenceModel(tmp_path / "stacked", olmoe.model)
    olmoe.model.save_pretrained(together.directory, save_original_format=False)
    with load_stacked_decoder(olmoe) as (_, apart), load_stacked_decoder(together) as (_, joined):
        assert torch.equal(apart.stack.gate_up, joined.stack.gate_up)
        assert torch.equal(apart.stack.down, joined.stack.down)


def both_ways(decoder: CudaGraphDecoder) -> None:
    """Prompts and steps, in whose layers others are asked for than in the pass before."""
    for number in range(4):
        ids = [(7 * n * n + number) % 61 for n in range(30)]
        compute_scores(decoder, ids, prefill=18, chunk=1 + number % 2)


@pytest.mark.parametrize("slots", [0, 1])
def test_no_row_is_overwritten_before_all_is_computed_that_reads_it(
    slots: int, olmoe: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_row_accesses(monkeypatch, install_fake_device(monkeypatch))
    with load_stacked_decoder(olmoe, slots=slots) as (decoder, experts):
        both_ways(decoder)
        experts.check_integrity()
    assert seen.overwritten > 20
    assert seen.early == []


@pytest.mark.parametrize("owner", [StackedMlp, PiecewiseStep], ids=["prompts", "steps"])
@pytest.mark.parametrize("lane", [1, 2], ids=["who is there", "who came"])
def test_who_is_computed_and_not_told_of_is_overwritten_too_early(
    lane: int, owner: type, olmoe: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what watches would see if one of the four places where it is told were gone."""
    seen, told = record_row_accesses(monkeypatch, install_fake_device(monkeypatch)), [0]
    cross = "_run_experts" if owner is PiecewiseStep else "__call__"
    ask, computed, read = (
        StackedExperts.request,
        StackedExperts.record_computed,
        getattr(owner, cross),
    )
    silent = False

    def reading(*arguments: Any) -> Any:
        nonlocal silent
        silent = True
        try:
            return read(*arguments)
        finally:
            silent = False

    def asked(self: StackedExperts, *arguments: Any) -> bool:
        told[0] = 0
        return ask(self, *arguments)

    def forgetful(self: StackedExperts, place: int) -> None:
        told[0] += 1
        if not (silent and told[0] == lane):
            computed(self, place)

    monkeypatch.setattr(owner, cross, reading)
    monkeypatch.setattr(StackedExperts, "request", asked)
    monkeypatch.setattr(StackedExperts, "record_computed", forgetful)
    with load_stacked_decoder(olmoe, slots=0) as (decoder, _):
        both_ways(decoder)
    assert seen.early
