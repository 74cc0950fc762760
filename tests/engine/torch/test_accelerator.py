"""Whether there is a CUDA device, what it keeps, and how its absence and its faults are told."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

from expertctl.engine.torch import devices
from expertctl.engine.torch.devices import (
    LIBRARY_RESERVE,
    StreamPool,
    find_device_budget,
    find_free_bytes,
    require_cuda,
    translate_device_errors,
)
from expertctl.errors import BudgetError, DeviceError, ExpertError, NotFoundError, UsageError


@pytest.mark.parametrize(
    ("version", "said"), [(None, "was built without CUDA"), ("13.0", "sees no CUDA device")]
)
def test_the_cause_is_told(version: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    for call in (require_cuda, lambda: find_device_budget(None)):
        with pytest.raises(NotFoundError, match=said):
            call()


@pytest.mark.parametrize(
    ("free", "wanted", "given"),
    [
        (LIBRARY_RESERVE + 100, None, 100),
        (LIBRARY_RESERVE + 100, 60, 60),
        (LIBRARY_RESERVE + 100, 160, 100),
        (LIBRARY_RESERVE + 1, None, 1),
    ],
)
def test_the_budget_leaves_a_reserve(
    free: int, wanted: int | None, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: free)
    assert find_device_budget(wanted) == given


@pytest.mark.parametrize("wanted", [None, 100])
def test_a_device_that_others_have_filled_says_so(
    wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: LIBRARY_RESERVE)
    with pytest.raises(BudgetError, match=r"^the CUDA device has 536\.9 MB free, but") as told:
        find_device_budget(wanted)
    assert "nvidia-smi" in told.value.hint
    assert "--device cpu" in told.value.hint


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(130))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 200))
    assert find_free_bytes() == 130


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), BudgetError, "less mem"),
        (RuntimeError("CUDA error: out of memory\nCompile with"), BudgetError, "less memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            BudgetError,
            "less memory",
        ),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel"),
            DeviceError,
            "^the CUDA device failed: CUDA error: an illegal memory access was encountered$",
        ),
    ],
)
def test_what_a_device_cannot_do_is_told_with_its_way_out(
    error: RuntimeError, kind: type[ExpertError], said: str
) -> None:
    with pytest.raises(kind, match=said) as told, translate_device_errors():
        raise error
    assert type(told.value) is kind
    assert told.value.__cause__ is error
    assert "--device cpu" in told.value.hint


@pytest.mark.parametrize("error", [RuntimeError("a tensor has no such size"), UsageError("no")])
def test_what_is_not_the_fault_of_a_device_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as told, translate_device_errors():
        raise error
    assert told.value is error


class Workspaces:
    """What of CUDA is asked to measure them: a stream has one from its first product on."""

    def __init__(self, size: int, *, passing: bool = False) -> None:
        self.size, self.passing = size, passing
        self.has = set[int]()
        self.allocated = self.peak = 1000
        self.threads = set[int]()

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.threads.add(threading.get_ident())
        if id(stream) not in self.has:
            self.peak = max(self.peak, self.allocated + self.size)
            if not self.passing:
                self.has.add(id(stream))
                self.allocated += self.size
        yield

    def reset(self, _: object) -> None:
        self.peak = self.allocated


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspaces]:
    found = Workspaces(32 << 20)
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "STREAM_POOL", StreamPool())
    for name, value in {
        "is_available": lambda: True,
        "Stream": lambda _: SimpleNamespace(device=cpu, synchronize=lambda: None),
        "stream": found.stream,
        "synchronize": lambda _: None,
        "reset_peak_memory_stats": found.reset,
        "memory_allocated": lambda _: found.allocated,
        "max_memory_allocated": lambda _: found.peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 0)
    devices._measure_workspace.cache_clear()
    yield found
    devices._measure_workspace.cache_clear()


@pytest.mark.parametrize("passing", [False, True])
def test_what_libraries_keep_for_a_stream_is_measured_once_by_a_thread_that_ends(
    passing: bool, workspaces: Workspaces
) -> None:
    workspaces.passing = passing
    for _ in range(2):
        assert devices.get_workspace_bytes() == 32 << 20
    assert len(workspaces.threads) == 1
    assert threading.get_ident() not in workspaces.threads
    assert workspaces.allocated - 1000 == (0 if passing else 32 << 20)


def test_the_stream_that_was_measured_is_the_next_that_is_acquired(workspaces: Workspaces) -> None:
    devices.get_workspace_bytes()
    lent = devices.acquire_stream(torch.device("cpu"), computes=True)
    assert devices.measure_product_workspace(lent) == 0, "it has its workspace already"


def test_where_a_stream_was_used_before_torch_knows_the_size(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces.size = 0
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 8 << 20)
    assert devices.get_workspace_bytes() == 8 << 20
    devices._measure_workspace.cache_clear()
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size")
    assert devices.get_workspace_bytes() == 0


def test_a_processor_keeps_nothing(workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    assert (devices.get_workspace_bytes(), workspaces.threads) == (0, set())


def test_where_there_is_no_device_nothing_is_kept(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (devices.get_workspace_bytes(), workspaces.threads) == (0, set())


def test_a_handled_error_keeps_no_memory_of_what_failed() -> None:
    held = list[weakref.ref[torch.Tensor]]()

    @translate_device_errors()
    def fill() -> None:
        memory = torch.empty(4)
        held.append(weakref.ref(memory))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    gc.disable()
    try:
        with suppress(BudgetError):
            fill()
        assert held[0]() is None, "without a collection of cycles"
    finally:
        gc.enable()
