"""The course of a run as a picture: memory, the queue, and the time to the first token."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.caller import Told
from benchmarks.soak.watch import Sample

STRETCHES = 60
"""Percentiles are taken over so many stretches of the time."""
_QUEUES = {
    "expertctl_queue_jobs": "wait",
    "expertctl_preparing_jobs": "prepared",
    "expertctl_batch_texts": "written",
}


def plot(samples: Sequence[Sample], told: Sequence[Told], path: Path) -> None:
    """Draw three curves above each other, over minutes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    begun = samples[0].at
    minutes = [(sample.at - begun) / 60 for sample in samples]
    figure, (memory, queue, first) = pyplot.subplots(3, 1, sharex=True, figsize=(8, 8))
    memory.plot(minutes, [sample.processes.resident / 1e6 for sample in samples])
    memory.set_ylabel("MB resident")
    for name, label in _QUEUES.items():
        jobs = [sample.metric(name) for sample in samples]
        queue.plot(minutes, jobs, linewidth=0.6, label=label)
    queue.set_ylabel("jobs and texts")
    queue.legend(loc="upper right")
    for share in (0.5, 0.99):
        at, seconds = _percentile(told, begun=begun, end=samples[-1].at, share=share)
        first.plot(at, seconds, label=f"p{share * 100:.0f}")
    first.set_ylabel("seconds to the first token")
    first.set_yscale("log")
    first.set_xlabel("minutes")
    first.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _percentile(
    told: Sequence[Told], *, begun: float, end: float, share: float
) -> tuple[list[float], list[float]]:
    """Return the middle of each stretch, in minutes, and the percentile in it."""
    length = (end - begun) / STRETCHES
    at, seconds = list[float](), list[float]()
    for number in range(STRETCHES):
        since = begun + number * length
        firsts = sorted(
            one.first for one in told if one.first and since <= one.begun < since + length
        )
        if firsts:
            at.append((number + 0.5) * length / 60)
            seconds.append(firsts[min(int(share * len(firsts)), len(firsts) - 1)])
    return at, seconds
