"""The CUDA device: whether there is one, how much memory an engine may take, and how it fails."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

from expertctl.engine.device_streams import LentStream, lend_stream
from expertctl.errors import BudgetError, DeviceError, ExpertError, NotFoundError
from expertctl.routing.request import DeviceName
from expertctl.settings import human_size

CUDA = torch.device("cuda")
RESERVE = 512 << 20
"""Left for what no ledger counts: kernels that are loaded late, handles, rounding."""
_ON_THE_CPU = "or compute on the processor with --device cpu"
_FAILED = ("CUDA error:", "CUDA driver error:", "cuDNN error:")
"""How torch begins to tell that a device failed; a class for it is new in 2.8."""
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_SIDE = 64
"""Rows and columns of the matrices that are multiplied to measure what a product takes."""


def has_cuda() -> bool:
    """Tell whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def check_cuda() -> None:
    """Demand a CUDA device.

    Raises:
        NotFoundError: when torch sees none.
    """
    if has_cuda():
        return
    if torch.version.cuda is None:
        raise NotFoundError(
            f"this torch, {torch.__version__}, was built without CUDA",
            hint=f"install torch for CUDA, see https://pytorch.org, {_ON_THE_CPU}",
        )
    raise NotFoundError(
        "torch sees no CUDA device", hint=f"see what `nvidia-smi` says, {_ON_THE_CPU}"
    )


def device_name(device: DeviceName) -> str | None:
    """Return what a device is sold as; None for the processor."""
    if device == "cpu":
        return None
    return torch.cuda.get_device_name(CUDA) if CUDA.type == "cuda" else str(CUDA)


def device_budget(wanted: int | None) -> int:
    """Return the bytes of device memory that an engine may take: what is asked for, if it is free.

    Raises:
        NotFoundError: when there is no such device.
        BudgetError: when others have taken nearly all of its memory.
    """
    check_cuda()
    free = free_bytes()
    if free <= RESERVE:
        raise BudgetError(
            f"the CUDA device has {human_size(free)} free, no more than the "
            f"{human_size(RESERVE)} that are left to its libraries",
            hint=f"end what else uses it, see `nvidia-smi`, {_ON_THE_CPU}",
        )
    return free - RESERVE if wanted is None else min(wanted, free - RESERVE)


def free_bytes() -> int:
    """Return how much of the device's memory is free.

    Memory that torch keeps of freed tensors is given back first.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(CUDA)
    return free


def workspace_bytes() -> int:
    """Return what libraries keep on the device for each stream that products are computed on.

    How much depends on the device, on torch and on the environment, so it is measured, once.
    Where there is no device nothing is kept.
    """
    return _workspace_of(CUDA) if CUDA.type == "cuda" and has_cuda() else 0


@contextmanager
def told_when_full() -> Iterator[None]:
    """Turn what torch raises when the device is full, or fails, into an error with a way out.

    Others may take what was free when the budget was set, and sizes of passes are estimates.

    Raises:
        BudgetError: in its place, where memory is what is missing.
        DeviceError: in its place, where the device failed.
    """
    try:
        yield
    except RuntimeError as error:
        told = _told(error)
        if told is None:
            raise
        raise told from error


def _told(error: RuntimeError) -> ExpertError | None:
    """Return what to say of an error; None where it is not the device's."""
    said = str(error).partition("\n")[0]
    has_failed = said.startswith(_FAILED)
    if isinstance(error, torch.OutOfMemoryError) or (has_failed and any(f in said for f in _FULL)):
        return BudgetError(
            "the CUDA device has less memory left than the budget allows",
            hint="end other programs on the device, set a smaller --memory-budget, shorten the "
            f"prompt, {_ON_THE_CPU}",
        )
    if not has_failed:
        return None
    return DeviceError(
        f"the CUDA device failed: {said}",
        hint="start again, for a process whose device failed cannot go on; see what `nvidia-smi` "
        f"says, {_ON_THE_CPU}",
    )


@cache
def _workspace_of(device: torch.device) -> int:
    """Measure it in a thread that ends.

    Libraries keep a workspace for each stream of each thread that computes, and the next thread
    takes over what a thread leaves. So this one has had none on that stream, and adds none.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="workspace") as pool:
        lent = lend_stream(device, computes=True)
        measured = pool.submit(taken_by_products, lent).result()
    return max(measured, _said_workspace())


@torch.inference_mode()
def taken_by_products(lent: LentStream) -> int:
    """Return how much memory a device gives to products on a stream besides their result."""
    device = lent.stream.device
    one = torch.ones(_SIDE, _SIDE, device=device)
    made = torch.empty_like(one)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(lent.stream):
        torch.mm(one, one, out=made)
        torch.addmm(one[0], one, one, out=made)  # with a bias another library computes it
        torch.bmm(one[None], one[None], out=made[None])
    lent.stream.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _said_workspace() -> int:
    """Return the size that torch states; 0 where it is too old to state one."""
    said = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return 0 if said is None else int(said())
