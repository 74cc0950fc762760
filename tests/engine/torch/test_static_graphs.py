"""Which step is replayed when, with a device in play that calls again what it captured.

A graph that outlived the memory it reads and writes would replay a step over that memory, so scores
would be those of another text or plan. What a true device does is in ``test_on_cuda``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertctl.engine.torch import cuda_graph_decoder, devices
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graphs import CUDAGraphPool
from expertctl.engine.torch.devices import StreamPool
from expertctl.engine.torch.sequence_cache import KVCache
from tests.engine.conftest import MakeReferenceModel, assert_same_logits, stack_logits
from tests.engine.torch.test_cuda_graph_decoder import (
    alone,
    arena_of,
    decoder_of,
    plans_of,
    prompt_of,
    token_of,
)


class Device:
    """What of CUDA graphs uses; pools that no graph has are gone, as torch's allocator has it."""

    def __init__(self) -> None:
        self.pools = count(1)
        self.gone = set[int]()
        self.used = list[int]()
        self.calls: list[Callable[[], None]] = []
        self.waits = 0
        self.waited = list[tuple[SimpleNamespace, SimpleNamespace]]()
        """Which stream was told to wait for which."""
        self.captured_on = list[SimpleNamespace]()
        self.current = self.usual = self.new_stream()

    def new_stream(self, _: object = None) -> SimpleNamespace:
        found = SimpleNamespace(synchronize=self._wait)
        found.wait_stream = lambda other: self.waited.append((found, other))
        return found

    def _wait(self) -> None:
        self.waits += 1

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(
        self, graph: Any, *, pool: int, stream: SimpleNamespace, **_: object
    ) -> Iterator[None]:
        assert pool not in self.gone, "a pool that is gone cannot be used again"
        self.used.append(pool)
        self.captured_on.append(stream)
        before, self.current = self.current, stream  # which stays where it ends badly
        try:
            yield
        except BaseException:
            self.gone |= {pool} if self.used.count(pool) == 1 else set()
            raise
        graph.replay, self.current = self.calls[-1], before

    def recorded(self, function: Callable[[], None]) -> Callable[[], None]:
        """Hear what is called, to call it again at each replay."""

        def call() -> None:
            self.calls.append(function)
            function()

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(devices, "STREAM_POOL", StreamPool())
    for name, value in {
        "graph_pool_handle": lambda: next(found.pools),
        "current_stream": lambda _: found.current,
        "Stream": found.new_stream,
        "stream": found.stream,
        "CUDAGraph": SimpleNamespace,
        "graph": found.capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    run = CUDAGraphPool.run
    monkeypatch.setattr(
        CUDAGraphPool,
        "run",
        lambda graphs, key, function: run(graphs, key, found.recorded(function)),
    )
    return found


def capturing(decoder: CudaGraphDecoder) -> CudaGraphDecoder:
    decoder.graphs._captures = True  # where its weights are does not matter then
    return decoder


def test_what_is_replayed_belongs_to_the_texts_and_plans_of_the_step(
    device: Device, oracle: MakeReferenceModel
) -> None:
    """Batches and arenas that grow, plans that come, go and are wider, and rests between."""
    model = oracle("llama", attention_bias=True, mlp_bias=True)
    decoder, plain = capturing(decoder_of(model)), model.load_decoder()
    plans = plans_of(decoder.config)
    wanted = [alone(plain, number, plan) for number, plan in enumerate(plans)]
    arenas = [arena_of(decoder, 4), arena_of(decoder, 2), arena_of(decoder, 4, capacity=30)]
    for turn, numbers in enumerate([(0,), (1,), (0,), (2, 3), (1, 0), (4, 5, 6), (0, 1), (6, 2)]):
        arena = arenas[0 if len(numbers) > 2 else turn % 3]
        rows = [arena.get_row(place) for place in range(len(numbers))]
        texts = list(zip(numbers, rows, strict=True))
        for number, row in texts:
            decoder.prefill(prompt_of(number), row, plans[number])
        for step in range(3):
            batch = [GraphStepRow(token_of(n, step), row, plans[n]) for n, row in texts]
            for number, scores in zip(numbers, decoder.step(batch), strict=True):
                assert_same_logits(scores[None], wanted[number][step + 1 : step + 2])
        if turn % 4 == 2:
            decoder.free_buffers()
    assert 0 < decoder.graphs.captured < 8 * 3, "some were replayed"


def test_where_there_are_too_many_all_go_when_the_last_is_done(device: Device) -> None:
    """One alone would take the workspace with it that the others were captured with."""
    graphs, done, there = (
        CUDAGraphPool(torch.device("cuda"), max_graphs=2),
        list[str](),
        list[int](),
    )
    for name in ("one", "two", "one", "three", "one", "two"):
        graphs.run(name, lambda name=name: done.append(name))  # type: ignore[misc]
        there.append(len(graphs))
        assert done[-1] == name
    assert there == [1, 2, 2, 1, 2, 1]
    assert graphs.captured == 5
    assert device.waits == 2
    assert device.used == [1, 1, 2, 2, 3], "a pool without graphs is gone"


def test_steps_of_a_kind_that_is_left_behind_are_not_kept(
    device: Device, oracle: MakeReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph_decoder, "MAX_GRAPH_KEYS", 2)
    model = oracle("llama")
    decoder, found = capturing(decoder_of(model)), []
    row = arena_of(decoder, 1, capacity=60).get_row(0)
    for token in range(40):
        found.append(decoder.decode(token % 50, row).logits)
        assert len(decoder.graphs) <= 2
    assert decoder.graphs.captured > 2
    cache, plain = KVCache(decoder.config, 60), model.load_decoder()
    theirs = [plain.decode(token % 50, cache).logits for token in range(40)]
    assert_same_logits(stack_logits(found), stack_logits(theirs))


def test_after_a_capture_that_failed_the_next_one_begins_with_another_pool(device: Device) -> None:
    graphs, done = CUDAGraphPool(torch.device("cuda")), list[str]()

    def full() -> None:
        if len(device.used) > len(done):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.run("a step", full)
    assert graphs.captured == 0
    assert device.current is device.usual
    [side] = device.captured_on
    assert device.waited[-1] == (device.usual, side), "what was called before it failed goes on"
    for name in ("a step", "another", "a step"):
        graphs.run(name, lambda name=name: done.append(name))  # type: ignore[misc]
    assert done == ["a step"] * 3 + ["another"] * 3 + ["a step"]
    assert device.used == [1, 2, 2]
    graphs.clear()
    graphs.run("a step", lambda: None)
    assert device.used == [1, 2, 2, 3]


def test_graphs_are_freed_when_the_last_one_has_ended(device: Device) -> None:
    graphs = CUDAGraphPool(torch.device("cuda"))
    graphs.clear()
    graphs.run("a step", lambda: None)
    assert device.waits == 0
    graphs.clear()
    assert device.waits == 1
    graphs.clear()
    assert device.waits == 1, "nothing is left that could run"


def test_no_two_owners_of_graphs_capture_on_one_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has so many and hands them out in turn; the next base has those of the one before."""
    first, second = device.new_stream(), device.new_stream()
    in_turn = cycle([first, first, second])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: next(in_turn))
    for _ in range(2):
        owners = [CUDAGraphPool(torch.device("cuda")) for _ in range(2)]
        for graphs in owners:
            graphs.run("a step", lambda: None)
            graphs.clear()
            graphs.run("a step", lambda: None)
        assert all(len(graphs) == 1 for graphs in owners)
        del owners, graphs
    assert [stream is first for stream in device.captured_on] == [True, True, False, False] * 2
