import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
{before}
import expertctl.routing
assert {key!r} in os.environ if {kept} else {key!r} not in os.environ
import numpy
a = numpy.ones((600, 600), numpy.float32)
a @ a
print(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1)
"""
LINUX = Path("/proc/self/task").is_dir()
KEY = "OPENBLAS_NUM_THREADS"


def threads(*, before: str = "", kept: bool = False, **environment: str) -> int:
    program = PROGRAM.format(before=before, key=KEY, kept=kept)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stdout)


def test_routing_loads_numpy_with_one_thread_and_leaves_the_environment_alone() -> None:
    assert threads() == 1


def test_a_thread_count_that_the_user_set_is_obeyed() -> None:
    assert threads(kept=True, **{KEY: "2"}) == (min(2, os.cpu_count() or 1) if LINUX else 1)


def test_a_numpy_that_is_loaded_already_is_left_alone() -> None:
    assert threads(before="import numpy") >= 1
