"""The CUDA device: whether there is one, and how much of its memory an engine may take."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertctl.errors import BudgetError, NotFoundError
from expertctl.routing.request import DeviceName

CUDA = torch.device("cuda")
RESERVE = 512 << 20
"""What is left to what no ledger sees: kernels that are loaded late, workspaces, rounding."""
_ON_THE_CPU = "or compute on the processor with --device cpu"


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
    """Return what a device is sold as; None of the processor."""
    if device == "cpu":
        return None
    return torch.cuda.get_device_name(CUDA) if CUDA.type == "cuda" else str(CUDA)


def device_budget(wanted: int | None) -> int:
    """Return the bytes of device memory that an engine may take: what is asked for, if it is free.

    Raises:
        NotFoundError: when there is no such device.
    """
    check_cuda()
    most = max(free_bytes() - RESERVE, 0)
    return most if wanted is None else min(wanted, most)


def free_bytes() -> int:
    """Return how much of the device's memory nobody has taken.

    What torch keeps of tensors that are gone goes back first.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(CUDA)
    return free


@contextmanager
def told_when_full() -> Iterator[None]:
    """Give what torch raises where the device has no memory left its way out.

    Others may take what was free when the budget was set, and sizes of passes are known about.

    Raises:
        BudgetError: in its place.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            "the CUDA device has less memory left than the budget allows",
            hint="end other programs on the device, set a smaller --memory-budget, shorten the "
            f"prompt, {_ON_THE_CPU}",
        ) from error
