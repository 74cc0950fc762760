"""What a call allocates, whatever other threads of the test process do meanwhile."""

from collections.abc import Callable

from expertctl.engine.allocations import Allocations, allocations


def nothing() -> None:
    """Do nothing."""


def fewest_allocations(
    call: Callable[[], object], *, before: Callable[[], object] = nothing, times: int = 4
) -> Allocations:
    """Call so many times; return what was allocated in the quietest one.

    What the call allocates is there each time; threads of others, such as those of a runner of
    tests that reports home, are not. What ``before`` allocates ahead of each call is not counted.
    """
    measured = []
    for _ in range(times):
        before()
        with allocations() as found:
            call()
        measured.append(found)
    return min(measured, key=lambda found: found.python_bytes)
