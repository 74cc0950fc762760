"""The row of a CUDA device: the processor stands in its place, with a base of two layers."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cache_policies import Trace
from benchmarks.routed import on_device
from benchmarks.routed.on_device import (
    CASE,
    DeviceDecoders,
    DeviceFigure,
    DeviceFollowTask,
    DevicePlacement,
    DeviceReportTask,
    DeviceSetup,
    DeviceTask,
    compare_on_device,
    measure_turns,
)
from expertctl.package.model_config import read_model_config


@pytest.fixture
def setting(directory: Path, trace: Trace) -> DeviceSetup:
    return DeviceSetup(directory, len(trace), share=0.6, device="cpu")


@pytest.fixture
def engine(setting: DeviceSetup, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceDecoders]:
    for name, few in (("CONTEXT", 48), ("WARM_UP", 32), ("STEPS", 12)):
        monkeypatch.setattr(on_device, name, few)
    with closing(DeviceDecoders(setting)) as engine:
        yield engine


def test_both_read_the_same_text_with_the_same_scores(engine: DeviceDecoders) -> None:
    for _ in range(3):
        for held in DevicePlacement:
            assert engine.run(DeviceFollowTask(held, 20), 1) > 0
    all_there, some = (engine.texts[held] for held in DevicePlacement)
    assert all_there.read == some.read
    assert all_there.row.length == some.row.length
    for token in range(20):
        scores = [text.decoder.decode(token, text.row).logits for text in (all_there, some)]
        assert np.array_equal(*scores)
    for text in (all_there, some):
        text.experts.check_integrity()


def test_the_share_is_of_all_experts_the_pool_among_them(engine: DeviceDecoders) -> None:
    assert len(engine.texts[DevicePlacement.ALL].experts.stack) == 2 * 8
    assert len(engine.texts[DevicePlacement.SOME].experts.stack) == int(0.6 * 2 * 8)


def test_they_take_turns_and_the_row_says_what_it_cost(engine: DeviceDecoders) -> None:
    turns: list[DevicePlacement] = []

    def run(task: DeviceTask, threads: int) -> float:
        turns.extend([task.held] if isinstance(task, DeviceFollowTask) else [])
        return engine.run(task, threads)

    found = measure_turns(run, simulates="little", rounds=2)
    assert turns == [DevicePlacement.ALL, DevicePlacement.SOME] * 2 + [
        DevicePlacement.SOME,
        DevicePlacement.ALL,
    ]
    assert (found.case, found.target, found.unit) == (CASE, ">= 0.6", "tok/s")
    assert found.ours is not None
    assert found.theirs is not None
    assert found.ratio == pytest.approx(found.ours / found.theirs, rel=0.01)
    assert "requests had no slot; for a token" in str(found.note)
    assert 0 < engine.run(DeviceReportTask(DeviceFigure.MISSES), 1) < 1
    one = 3 * 128 * 32 * 2
    assert 0 < engine.run(DeviceReportTask(DeviceFigure.READ), 1) < 2 * 2 * 2 * one, (
        "not all that a token asks for"
    )
    assert engine.run(DeviceReportTask(DeviceFigure.WAITED), 1) >= 0
    assert (
        engine.texts[DevicePlacement.ALL].read == engine.texts[DevicePlacement.SOME].read > 3 * 12
    )


def test_a_machine_without_a_device_or_room_says_so_and_misses_no_target(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"tokens": 80, "rounds": 1}
    monkeypatch.setattr(on_device, "is_cuda_available", lambda: False)
    none = compare_on_device(directory, simulates="little", **wanted)
    assert (none.case, none.ours, none.ok, none.target) == (CASE, None, None, ">= 0.6")
    monkeypatch.setattr(on_device, "is_cuda_available", lambda: True)
    monkeypatch.setattr(on_device, "find_free_bytes", lambda: 1 << 30)
    small = compare_on_device(directory, simulates="little", **wanted)
    assert "2.1 GB of the device, 1.1 are free" in str(small.note)
    assert small == replace(none, note=small.note)


def test_room_is_wanted_for_all_experts_and_the_share_of_them(directory: Path) -> None:
    config = read_model_config(directory)
    experts = 2 * 8 * 3 * 128 * 32 * 2
    assert on_device.estimate_device_bytes(config) > 1.4 * experts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_row_of_a_device(directory: Path, trace: Trace) -> None:
    found = compare_on_device(directory, tokens=len(trace), simulates="little", rounds=1)
    assert found.ours is not None
    assert torch.cuda.get_device_name() in str(found.note)
