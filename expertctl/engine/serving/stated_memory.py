"""What the log of a server says at its start about the memory that it may come to take.

All that grows with what is asked is in the budget: experts, buffers, keys and values. Outside of it
are the interpreter, its libraries and compiled kernels, and what belongs to requests that are under
way, to jobs that are kept and to plans that are remembered, which the server bounds.

What is outside is measured twice. After the base was loaded it is the resident set less the ledger;
that is too little where the ledger counts memory that nothing has written yet, such as room for
routed experts. Before the base is loaded it is the whole resident set. The larger one counts.
"""

from dataclasses import dataclass

from expertctl.settings import human_limit, human_size

REQUESTS_BYTES = 128 << 20
"""Room that is stated for requests, answers and jobs; in use it is seldom half of that."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What the process of a server had at its start, in bytes."""

    before: int
    """Resident before its base was loaded."""
    resident: int
    """Resident when its base is in memory and was run once."""
    entered: int
    """In the budget then, whether it is resident yet or not."""

    @property
    def outside(self) -> int:
        """What is resident beside the budget."""
        return max(self.resident - self.entered, self.before)


def memory_bound(process: ProcessMemory, *, budget: int) -> int:
    """Return how many bytes a server's process takes at most."""
    return budget + process.outside + REQUESTS_BYTES


def describe_memory(
    process: ProcessMemory | None, *, budget: int, kept_kv: int, weights: int
) -> str:
    """Return the sentence of the log; sizes are bytes.

    ``process`` is None where the system does not tell, or the budget is that of a device.
    """
    within = (
        f"the budget is {human_limit(budget)}: {human_size(weights)} for the base, up to "
        f"{human_size(kept_kv)} for keys and values of earlier requests (--prefix-cache-memory), "
        "the rest for experts and requests that run"
    )
    if process is None:
        return f"memory: {within}"
    bound = memory_bound(process, budget=budget)
    beside = human_size(bound - budget)
    return f"memory: at most {human_size(bound)}; {within}; {beside} beside it for the program"
