"""How many threads the products of a model are worth.

Streams of a CUDA device, each lent to one owner at a time.

Torch has 32 streams for a device and hands them out in turn, so it soon returns one that another
owner has. Two owners must not share one: what is copied on a stream that is being captured would
become part of the graph. And with the first graph that goes, torch lets go of the workspace that
libraries have for its stream, which graphs of another owner would still use.

A stream that was given back is lent again before another is taken. Libraries keep a workspace for
each stream that ever computed products, so these are lent to compute, and others to copy.

The CUDA device: whether there is one, how much memory an engine may take, and how it fails.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from weakref import WeakValueDictionary

import torch

from expertctl.errors import BudgetError, DeviceError, ExpertError, NotFoundError
from expertctl.routing.request import DeviceName
from expertctl.settings import format_size

SMALL_MODEL = 64 << 20
"""Below so many bytes of weights a step is over before other threads have woken up."""


def choose_thread_count(weight_bytes: int) -> int:
    """Return the thread count for a model; torch has applied ``OMP_NUM_THREADS`` already."""
    if weight_bytes < SMALL_MODEL:
        return 1
    return min(torch.get_num_threads(), count_usable_cores())


def count_usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def use_torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads for the length of a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_MAX_ATTEMPTS = 64
"""So often torch is asked for a stream that is not known yet; it has 32."""


class StreamHandle:
    """A stream that is not lent again while this object is referred to."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Have it."""
        self.stream = stream


class StreamPool:
    """The owner of all streams taken from torch; several threads may ask at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._known: list[torch.cuda.Stream] = []
        self._computed = set[int]()
        self._lent: WeakValueDictionary[int, StreamHandle] = WeakValueDictionary()

    def acquire(self, device: torch.device, *, computes: bool) -> StreamHandle:
        """Lend a stream that no other owner has, to compute products on it or not.

        Raises:
            BudgetError: when all that torch has are lent.
        """
        with self._lock:
            free = [number for number in range(len(self._known)) if number not in self._lent]
            known = [number for number in free if number in self._computed]
            if computes:
                number = next(iter(known or free), None)
            else:
                number = next((number for number in free if number not in known), None)
            if number is None:
                number = self._create_stream(device, fallback=known)
            if computes:
                self._computed.add(number)
            lent = self._lent[number] = StreamHandle(self._known[number])
            return lent

    def _create_stream(self, device: torch.device, *, fallback: list[int]) -> int:
        """Take a stream of torch that is not known yet, else one of these; return its number."""
        for _ in range(_MAX_ATTEMPTS):
            stream = _make_cuda_stream(device)
            if stream not in self._known:
                self._known.append(stream)
                return len(self._known) - 1
        if fallback:
            return fallback[0]
        raise BudgetError(
            f"all {len(self._known)} streams of the CUDA device are in use",
            hint="close engines that are not needed any more",
        )


STREAM_POOL = StreamPool()
"""Those of this process: torch has one pool for all of it, too."""


def acquire_stream(device: torch.device, *, computes: bool) -> StreamHandle:
    """Lend a stream of this process, as `DeviceStreams.lend` does and with its errors."""
    return STREAM_POOL.acquire(device, computes=computes)


def _make_cuda_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it


CUDA = torch.device("cuda")
LIBRARY_RESERVE = 512 << 20
"""Left for what no ledger counts: kernels that are loaded late, handles, rounding."""
_CPU_HINT = "or compute on the processor with --device cpu"
_ERROR_PREFIXES = ("CUDA error:", "CUDA driver error:", "cuDNN error:")
"""How torch begins to tell that a device failed; a class for it is new in 2.8."""
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_PROBE_SIDE = 64
"""Rows and columns of the matrices that are multiplied to measure what a product takes."""


def is_cuda_available() -> bool:
    """Tell whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def require_cuda() -> None:
    """Demand a CUDA device.

    Raises:
        NotFoundError: when torch sees none.
    """
    if is_cuda_available():
        return
    if torch.version.cuda is None:
        raise NotFoundError(
            f"this torch, {torch.__version__}, was built without CUDA",
            hint=f"install torch for CUDA, see https://pytorch.org, {_CPU_HINT}",
        )
    raise NotFoundError(
        "torch sees no CUDA device", hint=f"see what `nvidia-smi` says, {_CPU_HINT}"
    )


def get_device_name(device: DeviceName) -> str | None:
    """Return what a device is sold as; None for the processor."""
    if device == "cpu":
        return None
    return torch.cuda.get_device_name(CUDA) if CUDA.type == "cuda" else str(CUDA)


def find_device_budget(requested: int | None) -> int:
    """Return the bytes of device memory that an engine may take: what is asked for, if it is free.

    Raises:
        NotFoundError: when there is no such device.
        BudgetError: when others have taken nearly all of its memory.
    """
    require_cuda()
    free = find_free_bytes()
    if free <= LIBRARY_RESERVE:
        raise BudgetError(
            f"the CUDA device has {format_size(free)} free, no more than the "
            f"{format_size(LIBRARY_RESERVE)} that are left to its libraries",
            hint=f"end what else uses it, see `nvidia-smi`, {_CPU_HINT}",
        )
    return free - LIBRARY_RESERVE if requested is None else min(requested, free - LIBRARY_RESERVE)


def find_free_bytes() -> int:
    """Return how much of the device's memory is free.

    Memory that torch keeps of freed tensors is given back first.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(CUDA)
    return free


def get_workspace_bytes() -> int:
    """Return what libraries keep on the device for each stream that products are computed on.

    How much depends on the device, on torch and on the environment, so it is measured, once.
    Where there is no device nothing is kept.
    """
    return _measure_workspace(CUDA) if CUDA.type == "cuda" and is_cuda_available() else 0


@contextmanager
def translate_device_errors() -> Iterator[None]:
    """Turn what torch raises when the device is full, or fails, into an error with a way out.

    Others may take what was free when the budget was set, and sizes of passes are estimates.

    Raises:
        BudgetError: in its place, where memory is what is missing.
        DeviceError: in its place, where the device failed.
    """
    try:
        yield
    except RuntimeError as error:
        told = _translate_error(error)
        if told is None:
            raise
        raise told from error


def _translate_error(error: RuntimeError) -> ExpertError | None:
    """Return what to say of an error; None where it is not the device's."""
    said = str(error).partition("\n")[0]
    has_failed = said.startswith(_ERROR_PREFIXES)
    if isinstance(error, torch.OutOfMemoryError) or (
        has_failed and any(f in said for f in _OUT_OF_MEMORY)
    ):
        return BudgetError(
            "the CUDA device has less memory left than the budget allows",
            hint="end other programs on the device, set a smaller --memory-budget, shorten the "
            f"prompt, {_CPU_HINT}",
        )
    if not has_failed:
        return None
    return DeviceError(
        f"the CUDA device failed: {said}",
        hint="start again, for a process whose device failed cannot go on; see what `nvidia-smi` "
        f"says, {_CPU_HINT}",
    )


@cache
def _measure_workspace(device: torch.device) -> int:
    """Measure it in a thread that ends.

    Libraries keep a workspace for each stream of each thread that computes, and the next thread
    takes over what a thread leaves. So this one has had none on that stream, and adds none.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="workspace") as pool:
        lent = acquire_stream(device, computes=True)
        measured = pool.submit(measure_product_workspace, lent).result()
    return max(measured, _get_stated_workspace_bytes())


@torch.inference_mode()
def measure_product_workspace(handle: StreamHandle) -> int:
    """Return how much memory a device gives to products on a stream besides their result."""
    device = handle.stream.device
    one = torch.ones(_PROBE_SIDE, _PROBE_SIDE, device=device)
    made = torch.empty_like(one)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(handle.stream):
        torch.mm(one, one, out=made)
        torch.addmm(one[0], one, one, out=made)  # with a bias another library computes it
        torch.bmm(one[None], one[None], out=made[None])
    handle.stream.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _get_stated_workspace_bytes() -> int:
    """Return the size that torch states; 0 where it is too old to state one."""
    said = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return 0 if said is None else int(said())
