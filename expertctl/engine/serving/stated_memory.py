"""What the log of a server says at its start about the memory that it may come to take.

All that grows with what is asked is in the budget: experts, buffers, keys and values. Outside of it
are the interpreter and its libraries, and what belongs to requests that are under way and to jobs
that are kept, both of which the server bounds.
"""

from expertctl.settings import human_limit, human_size

REQUESTS_BYTES = 128 << 20
"""Room that is stated for requests, answers and jobs; in use it is seldom half of that."""


def memory_bound(*, budget: int, resident: int, entered: int) -> int:
    """Return how many bytes a server's process takes at most.

    ``resident`` is what it has when its base is in memory, ``entered`` how much of that is in the
    budget.
    """
    return budget + max(resident - entered, 0) + REQUESTS_BYTES


def describe_memory(
    *, budget: int, kept_kv: int, weights: int, resident: int | None, entered: int
) -> str:
    """Return the sentence of the log; sizes are bytes, ``resident`` as in `memory_bound`."""
    within = (
        f"the budget is {human_limit(budget)}: {human_size(weights)} for the base, up to "
        f"{human_size(kept_kv)} for keys and values of earlier requests (--prefix-cache-memory), "
        "the rest for experts and requests that run"
    )
    if resident is None:
        return f"memory: {within}"
    bound = memory_bound(budget=budget, resident=resident, entered=entered)
    beside = human_size(bound - budget)
    return f"memory: at most {human_size(bound)}; {within}; {beside} beside it for the program"
