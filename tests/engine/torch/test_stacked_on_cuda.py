"""What only a CUDA device can show of routed experts: capture, copies beside work, whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.compile import TorchPlacement, fold_plan
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.torch import devices
from expertctl.engine.torch.cuda_graph_decoder import (
    CudaGraphDecoder,
    GraphStepRow,
    estimate_buffer_bytes,
)
from expertctl.engine.torch.cuda_graphs import estimate_graph_memory
from expertctl.engine.torch.devices import get_workspace_bytes
from expertctl.engine.torch.expert_stack import (
    DUMMY_ROW,
    STAGING_BUFFERS,
    ExpertStack,
    StackShape,
    estimate_stack_bytes,
    make_event,
)
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.package.model_config import read_model_config
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.conftest import MakeReferenceModel, ReferenceModel, build_reference_model
from tests.engine.random_experts import make_plan_form, make_random_expert
from tests.engine.reference_models import ROUTED_SHAPES
from tests.engine.torch.stacked_models import compute_scores, load_stacked_decoder, make_kv_cache
from tests.factories import write_base

__all__ = ["expertctl"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LIMIT = 1e-4
"""How far scores may be from those of a processor; products of CUDA are summed in other orders."""
ROUNDING = 4 << 20
"""Two blocks of the allocator."""
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]
SIZES: dict[str, Any] = {"head_dim": 16, "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory = tmp_path_factory.mktemp("qwen2") / "model"
    return build_reference_model(directory, "qwen2_moe", mlp_only_layers=[1], **SIZES)


@pytest.mark.parametrize(("arch", "config"), ROUTED_SHAPES)
def test_scores_are_those_of_transformers(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel
) -> None:
    model = oracle(arch, **config)
    for slots in (None, 2):
        with load_stacked_decoder(model, slots=slots, device=CUDA) as (decoder, experts):
            found = compute_scores(decoder, IDS, prefill=9)
            experts.check_integrity()
        assert float((found - model.compute_logits(IDS)[8:]).abs().max()) <= LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_captured_stages_with_experts_that_come_and_go_give_the_bits_of_all_being_there(
    slots: int, dtype: torch.dtype, model: ReferenceModel
) -> None:
    with load_stacked_decoder(model, slots=None, dtype=dtype, device=CUDA) as (decoder, _):
        whole = compute_scores(decoder, IDS * 2, prefill=9)
        assert decoder.graphs.captured > 0
    for captures in (True, False):
        options: dict[str, Any] = {"dtype": dtype, "device": CUDA, "captures": captures}
        with load_stacked_decoder(model, slots=slots, **options) as (decoder, experts):
            for _ in range(3):
                assert torch.equal(compute_scores(decoder, IDS * 2, prefill=9), whole)
                experts.check_integrity()
            assert (decoder.graphs.captured > 0) == captures
            assert experts.cache is not None
            assert experts.cache.activity().loads > 0


def test_a_stage_is_captured_once_for_each_bucket(model: ReferenceModel) -> None:
    with load_stacked_decoder(model, slots=1, device=CUDA) as (decoder, _):
        assert decoder._staged is not None
        stay, seen = decoder._staged.graphs, []
        for _ in range(2):
            row = make_kv_cache(decoder).get_row(0)
            for token in range(50):
                decoder.decode(token, row)
                seen.append(decoder.graphs.captured)
            decoder.free_buffers()
    buckets, layers = 5, 2  # of 4, 8, 16, 32 and 60 positions
    assert seen[49] == seen[39] == buckets * (layers + 1)
    assert seen[-1] == 2 * seen[49], "what reads keys and values goes with its text"
    assert stay.captured == 2 + layers, "who is there, who came, and what reads every token"


def test_graphs_that_stay_hold_no_more_than_was_announced(model: ReferenceModel) -> None:
    with load_stacked_decoder(model, slots=1, device=CUDA) as (decoder, experts):
        for _ in range(2):
            row = make_kv_cache(decoder).get_row(0)
            for token in range(20):
                decoder.decode(token, row)
            decoder.free_buffers()
            del row
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        decoder.close()
        torch.cuda.empty_cache()
        announced = estimate_graph_memory(decoder.config, experts.stack.shape)
        announced += get_workspace_bytes()  # that of their stream goes with them
        assert reserved - torch.cuda.memory_reserved() <= announced + ROUNDING


def test_a_copy_is_over_before_an_expert_is_in_a_row(model: ReferenceModel) -> None:
    with (
        load_stacked_decoder(model, slots=2, device=CUDA) as (_, experts),
        load_stacked_decoder(model) as (_, whole),
    ):
        for number in range(experts.config.count):
            selected = np.array([[number]])
            if experts.request(1, selected, np.ones((1, 1), np.float32)):
                experts.wait(1, 1)
            row = int(experts.look_up(1, torch.from_numpy(selected).to(CUDA)))
            assert row != DUMMY_ROW
            there, here = (
                experts.stack.gate_up[row],
                whole.stack.gate_up[whole.layer_rows(1)[number]],
            )
            assert torch.equal(there.cpu(), here)


def test_a_copy_waits_for_who_could_read_its_row_and_for_nobody_behind() -> None:
    shape = StackShape(hidden=64, intermediate=64, dtype=torch.float32)
    stack = ExpertStack(shape, blocks=2, device=CUDA)

    def read(block: np.ndarray[Any, Any]) -> int:
        block[...] = 1
        return block.nbytes

    for is_noted in (False, True):
        torch.cuda.synchronize()
        stack.record_reads(np.array([stack.locate(0), stack.locate(1)]))
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # about half a second
        done = make_event()
        done.record(torch.cuda.current_stream())
        if is_noted:
            stack.record_reads(np.array([stack.locate(0)]))
        stack.fill(0, read)
        assert done.query() == is_noted  # type: ignore[no-untyped-call]  # torch has no types
    stack.wait_for_reads()
    assert torch.equal(stack.gate_up[stack.locate(0)].cpu(), shape.split(_ones(shape))[0])


def test_rows_beyond_two_to_the_31_numbers_are_found() -> None:
    shape = StackShape(hidden=4096, intermediate=1024, dtype=torch.bfloat16)
    blocks = 2**31 // (2 * shape.intermediate * shape.hidden) + 1
    free, _ = torch.cuda.mem_get_info()
    if free < estimate_stack_bytes(shape, blocks=blocks + 64):
        pytest.skip("needs 7 GB of device memory")
    stack = ExpertStack(shape, blocks=blocks, device=CUDA)
    last = stack.locate(blocks - 1)
    assert last * stack.gate_up[0].numel() >= 2**31
    drawn = torch.randn(3 * 1024 * 4096, generator=torch.Generator().manual_seed(3)) / 64

    def read(block: np.ndarray[Any, Any]) -> int:
        block[...] = drawn.to(torch.bfloat16).view(torch.uint8).numpy()
        return block.nbytes

    stack.fill(0, read)
    stack.fill(blocks - 1, read)
    x = torch.randn(20, 4096, device=CUDA)
    for tokens in (1, 2, 20):  # torch takes another kernel for more than sixteen rows
        first = stack.apply(x[:tokens], torch.full((tokens, 1), stack.locate(0), device=CUDA))
        far = stack.apply(x[:tokens], torch.full((tokens, 1), last, device=CUDA))
        assert bool(first.any())
        assert torch.equal(first, far)


def test_streams_of_copies_and_captures_are_all_different(model: ReferenceModel) -> None:
    with load_stacked_decoder(model, slots=1, device=CUDA) as (decoder, experts):
        compute_scores(decoder, IDS, prefill=9)
        assert decoder._staged is not None
        buffers = [experts.stack._buffers.get() for _ in range(STAGING_BUFFERS)]
        lent = [buffer._stream._lease for buffer in buffers]
        lent += [decoder.graphs._side, decoder._staged.graphs._side]
        handles = {each.stream.cuda_stream for each in lent if each is not None}
        assert len(handles) == STAGING_BUFFERS + 2
        for buffer in buffers:
            experts.stack._buffers.put(buffer)


def _ones(shape: StackShape) -> torch.Tensor:
    return torch.ones(shape.nbytes, dtype=torch.uint8)


def test_where_all_are_there_as_many_are_counted_as_where_some_are_missing(
    model: ReferenceModel,
) -> None:
    found = []
    for slots in (None, 1):
        with load_stacked_decoder(model, slots=slots, device=CUDA) as (decoder, experts):
            compute_scores(decoder, IDS, prefill=5)
            decoder.free_buffers()
            counter = experts.cache or experts.device_counts
            assert counter is not None
            found.append(counter.counters.cumulative_snapshot().expert_counts.sum(1))
    assert np.array_equal(*found)


def test_a_step_allocates_nothing_on_the_device(model: ReferenceModel) -> None:
    with load_stacked_decoder(model, slots=1, device=CUDA) as (decoder, _):
        row, out = make_kv_cache(decoder, capacity=100).get_row(0), np.empty((1, 61), np.float32)

        def step(turn: int) -> None:
            decoder.step([GraphStepRow(turn % 61, row)], out=out)

        for turn in range(85):
            step(turn)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for turn in range(12):
            step(turn)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def plan_on(decoder: CudaGraphDecoder, kind: str, *, routed: bool) -> TorchDeltas:
    form = make_plan_form(decoder.config, TorchPlacement(decoder.device.type))
    plan = (
        fold_plan([make_random_expert(decoder.config, kind, seed=3)], form).compile().torch_deltas
    )
    return {name: delta for name, delta in plan.items() if routed or not is_routed_expert(name)}


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_plans_are_those_of_a_processor(kind: str, routed: bool, model: ReferenceModel) -> None:
    found = []
    for device in (CUDA, torch.device("cpu")):
        with load_stacked_decoder(model, slots=1, device=device) as (decoder, _):
            plan = plan_on(decoder, kind, routed=routed)
            found.append(compute_scores(decoder, IDS, prefill=5, deltas=plan))
    assert float((found[0] - found[1]).abs().max()) <= LIMIT


@pytest.mark.parametrize("slots", [None, 1])
@pytest.mark.parametrize("capacity", [64, 1500])
def test_no_more_is_taken_than_was_announced(
    capacity: int, slots: int | None, model: ReferenceModel
) -> None:
    with load_stacked_decoder(model, slots=slots, device=CUDA) as (decoder, experts):
        row = make_kv_cache(decoder, capacity=capacity).get_row(0)
        plan = plan_on(decoder, "lora", routed=False)
        decoder.decode(
            1, make_kv_cache(decoder).get_row(0), plan
        )  # libraries have their workspaces
        decoder.free_buffers()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoder.prefill([n % 61 for n in range(capacity - 20)], row, plan)
        for token in range(20):
            decoder.decode(token, row, plan)
        announced = estimate_buffer_bytes(
            read_model_config(model.directory),
            capacity=capacity,
            width=max(len(delta.a) for delta in plan.values() if delta.a is not None),
            experts=experts.stack.shape,
        )
        announced += (2 if experts.is_whole else 3) * get_workspace_bytes()
        assert torch.cuda.max_memory_allocated() - before <= announced + ROUNDING


def routed_base(folder: Path) -> Path:
    """Nearly all of it is routed experts."""
    return write_base(
        folder,
        arch="qwen3_moe",
        tie=False,
        layers=3,
        hidden=64,
        head_dim=16,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=320,
    )


def test_bench_measures_on_the_device(
    expertctl: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    expertctl("base", "add", routed_base(tmp_path / "base"))
    words = ("--resident", "1,0.5", "--rounds", "2", "--tokens", "8", "--device", "cuda")
    document = expertctl("bench", "moe", *words, "--json").document
    assert document["machine"]["device"] == torch.cuda.get_device_name()
    whole, *others = document["rows"]
    assert whole["slots"] == 12
    assert all(row["slots"] == 6 for row in others)


def test_run_answers_on_the_device_in_less_memory_than_a_base_wants(
    expertctl: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    base = routed_base(tmp_path / "base")
    monkeypatch.setattr(devices, "get_workspace_bytes", lambda: 0)  # they are more than the base
    expertctl("base", "add", base)
    words = ("run", "Sort these numbers: 41, 17", "--no-experts", "--greedy", "--json")
    options = ("--max-tokens", "24", "--device", "cuda")
    whole = expertctl(*words, *options).document
    partly = expertctl(*words, *options, "--memory-budget", "8MB").document
    assert whole["numerics"]["backend"] == partly["numerics"]["backend"] == "cuda"
    assert partly["text"] == whole["text"]
    assert whole["moe"]["slots"] == 12 > partly["moe"]["slots"]
    assert partly["moe"]["loads"] > 0
