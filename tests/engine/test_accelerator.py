"""Whether there is a CUDA device, and how its absence is told."""

import pytest
import torch

from expertctl.engine import accelerator
from expertctl.engine.accelerator import RESERVE, check_cuda, device_budget, free_bytes
from expertctl.errors import NotFoundError


@pytest.mark.parametrize(
    ("version", "said"), [(None, "was built without CUDA"), ("13.0", "sees no CUDA device")]
)
def test_the_cause_is_told(version: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "has_cuda", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    for call in (check_cuda, lambda: device_budget(None)):
        with pytest.raises(NotFoundError, match=said):
            call()


@pytest.mark.parametrize(
    ("free", "wanted", "given"),
    [
        (RESERVE + 100, None, 100),
        (RESERVE + 100, 60, 60),
        (RESERVE + 100, 160, 100),
        (RESERVE - 1, None, 0),
    ],
)
def test_the_budget_leaves_a_reserve(
    free: int, wanted: int | None, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "has_cuda", lambda: True)
    monkeypatch.setattr(accelerator, "free_bytes", lambda: free)
    assert device_budget(wanted) == given


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(130))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 200))
    assert free_bytes() == 130
