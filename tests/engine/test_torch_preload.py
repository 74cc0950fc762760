"""Mapping torch's library ahead of its import, in processes of their own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from expertctl.engine import torch_preload

LOOK = """
import sys, threading
from pathlib import Path
def mapped():
    return any("libtorch_cpu" in line for line in Path("/proc/self/maps").open())
def wait():
    [each.join() for each in threading.enumerate() if each is not threading.current_thread()]
"""
needs_torch_as_on_linux = pytest.mark.skipif(
    not Path("/proc/self/maps").exists() or find_spec("torch") is None,
    reason="looks at what is mapped, as Linux tells it",
)


def said_by(program: str) -> list[str]:
    command = [sys.executable, "-c", LOOK + program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@needs_torch_as_on_linux
def test_the_library_is_mapped_without_importing_torch_which_then_works() -> None:
    program = """
from expertctl.engine.torch_preload import preload_torch
print(mapped())
preload_torch()
wait()
print(mapped(), "torch" in sys.modules)
import torch
print((torch.ones(2, 3) @ torch.ones(3, 2)).sum().item())
"""
    assert said_by(program) == ["False", "True", "False", "12.0"]


@needs_torch_as_on_linux
def test_importing_torch_at_once_waits_for_it() -> None:
    program = """
from expertctl.engine.torch_preload import preload_torch
preload_torch()
import torch
print((torch.ones(2, 3) @ torch.ones(3, 2)).sum().item())
"""
    assert said_by(program) == ["12.0"]


@pytest.mark.parametrize(
    "origin", [None, "/nowhere/torch/__init__.py"], ids=["no torch", "not as known"]
)
def test_where_there_is_no_such_library_nothing_is_mapped(origin: str | None) -> None:
    program = f"""
from types import SimpleNamespace
from expertctl.engine import torch_preload
origin = {origin!r}
torch_preload.find_spec = lambda name: origin and SimpleNamespace(origin=origin)
torch_preload.preload_torch()
print(len(threading.enumerate()))
"""
    assert said_by(program) == ["1"]


@needs_torch_as_on_linux
def test_a_library_that_cannot_be_mapped_is_left_to_the_import(tmp_path: Path) -> None:
    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)
    for name in torch_preload.LIBRARIES:
        (lib / name).write_text("no library")
    program = f"""
from types import SimpleNamespace
from expertctl.engine import torch_preload
torch_preload.find_spec = lambda name: SimpleNamespace(origin={str(lib.parent / "__init__.py")!r})
torch_preload.preload_torch()
wait()
print(mapped())
"""
    assert said_by(program) == ["False"]
