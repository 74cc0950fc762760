"""Threads of torch, and the CUDA device: availability, memory, errors and streams.

Torch has 32 streams per device and hands them out in turn, so it soon returns one that another
owner is using. Two owners must not share a stream: a copy on a stream that is being captured would
become part of the graph. And when the first graph is freed, torch frees the libraries' workspace of
its stream, which graphs of another owner still use.
`StreamPool` therefore reuses a released stream before it takes another from torch. Libraries keep a
workspace for each stream that ever computed products, so streams for computing and streams for
copying are kept apart.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from weakref import WeakValueDictionary

import torch

from expertctl.errors import BudgetError, DeviceError, ExpertError, NotFoundError
from expertctl.settings import format_size


@contextmanager
def use_torch_threads(count: int) -> Iterator[None]:
    """Set torch's thread count for the length of a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_MAX_ATTEMPTS = 64
"""Attempts to get a new stream from torch, which has 32."""


class StreamHandle:
    """A stream that is not handed out again while this object is referenced."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Wrap a stream."""
        self.stream = stream


class StreamPool:
    """The owner of all streams taken from torch; thread-safe."""

    def __init__(self) -> None:
        """Start without streams."""
        self._lock = threading.Lock()
        self._known: list[torch.cuda.Stream] = []
        self._computed = set[int]()
        self._lent: WeakValueDictionary[int, StreamHandle] = WeakValueDictionary()

    def acquire(self, device: torch.device, *, computes: bool) -> StreamHandle:
        """Return a stream without another owner; ``computes`` says whether products will run on it.

        Raises:
            BudgetError: when all streams of torch are in use.
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
            handle = self._lent[number] = StreamHandle(self._known[number])
            return handle

    def _create_stream(self, device: torch.device, *, fallback: list[int]) -> int:
        """Take a new stream from torch, else one of ``fallback``; return its number."""
        for _ in range(_MAX_ATTEMPTS):
            stream = _make_cuda_stream(device)
            if stream not in self._known:
                self._known.append(stream)
                return len(self._known) - 1
        if fallback:
            return fallback[0]
        raise BudgetError(
            f"all {len(self._known)} streams of the CUDA device are in use",
            hint="close engines that are no longer needed",
        )


STREAM_POOL = StreamPool()
"""One pool per process, as torch's own pool is."""


def acquire_stream(device: torch.device, *, computes: bool) -> StreamHandle:
    """Return a stream of this process's pool; see `StreamPool.acquire`."""
    return STREAM_POOL.acquire(device, computes=computes)


def _make_cuda_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it


CUDA = torch.device("cuda")
LIBRARY_RESERVE = 512 << 20
"""Device memory that is not budgeted: kernels loaded late, library handles, rounding."""
_CPU_HINT = "or compute on the processor with --device cpu"
_ERROR_PREFIXES = ("CUDA error:", "CUDA driver error:", "cuDNN error:")
"""Prefixes of torch's messages about device failures; an error class exists only since 2.8."""
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_PROBE_SIDE = 64
"""Rows and columns of the matrices that are multiplied to measure the workspace."""


def is_cuda_available() -> bool:
    """Return whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def require_cuda() -> None:
    """Require a CUDA device.

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
    raise NotFoundError("torch sees no CUDA device", hint=f"check `nvidia-smi`, {_CPU_HINT}")


def get_device_name() -> str:
    """Return the product name of the device."""
    return torch.cuda.get_device_name(CUDA) if CUDA.type == "cuda" else str(CUDA)


def find_device_budget(requested: int | None) -> int:
    """Return the device memory that an engine may take: ``requested``, limited to what is free.

    Raises:
        NotFoundError: when there is no such device.
        BudgetError: when other programs use nearly all of its memory.
    """
    require_cuda()
    free = find_free_bytes()
    if free <= LIBRARY_RESERVE:
        raise BudgetError(
            f"the CUDA device has {format_size(free)} free, but "
            f"{format_size(LIBRARY_RESERVE)} are reserved for its libraries",
            hint=f"end other programs on it, see `nvidia-smi`, {_CPU_HINT}",
        )
    return free - LIBRARY_RESERVE if requested is None else min(requested, free - LIBRARY_RESERVE)


def find_free_bytes() -> int:
    """Return the free bytes of the device, after torch's unused cached memory is released."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(CUDA)
    return free


def get_workspace_bytes() -> int:
    """Return the bytes that libraries keep on the device for each stream that computes products.

    The size depends on the device, on torch and on the environment, so it is measured, once. It is
    0 where there is no device.
    """
    return _measure_workspace(CUDA) if CUDA.type == "cuda" and is_cuda_available() else 0


@contextmanager
def translate_device_errors() -> Iterator[None]:
    """Translate torch's errors about a full or failed device into errors with a hint.

    Other programs may take memory that was free when the budget was set, and pass sizes are
    estimates.

    Raises:
        BudgetError: where memory is missing.
        DeviceError: where the device failed.
    """
    try:
        yield
    except RuntimeError as error:
        translated = _translate_error(error)
        if translated is None:
            raise
        try:
            raise translated from error
        finally:
            del translated  # its traceback has this frame: as a cycle both would stay for a while


def _translate_error(error: RuntimeError) -> ExpertError | None:
    """Return the error to raise instead; None where the device is not the cause."""
    reason = str(error).partition("\n")[0]
    has_failed = reason.startswith(_ERROR_PREFIXES)
    if isinstance(error, torch.OutOfMemoryError) or (
        has_failed and any(f in reason for f in _OUT_OF_MEMORY)
    ):
        return BudgetError(
            "the CUDA device has less memory left than the budget allows",
            hint="end other programs on the device, set a smaller --memory-budget, shorten the "
            f"prompt, {_CPU_HINT}",
        )
    if not has_failed:
        return None
    return DeviceError(
        f"the CUDA device failed: {reason}",
        hint="restart, since a process cannot continue after a device failure; check "
        f"`nvidia-smi`, {_CPU_HINT}",
    )


@cache
def _measure_workspace(device: torch.device) -> int:
    """Measure the workspace in a thread that then ends.

    Libraries keep a workspace for each stream of each thread that computes, and the next thread
    takes over what a thread leaves. So this thread has none on that stream yet, and adds none.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="workspace") as pool:
        handle = acquire_stream(device, computes=True)
        measured = pool.submit(measure_product_workspace, handle).result()
    return max(measured, _get_stated_workspace_bytes())


@torch.inference_mode()
def measure_product_workspace(handle: StreamHandle) -> int:
    """Return the device bytes allocated for products on a stream besides their results."""
    device = handle.stream.device
    one = torch.ones(_PROBE_SIDE, _PROBE_SIDE, device=device)
    made = torch.empty_like(one)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(handle.stream):
        torch.mm(one, one, out=made)
        torch.addmm(one[0], one, one, out=made)  # with a bias, another library computes it
        torch.bmm(one[None], one[None], out=made[None])
    handle.stream.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _get_stated_workspace_bytes() -> int:
    """Return the size that torch states; 0 in versions that state none."""
    read_size = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return 0 if read_size is None else int(read_size())
