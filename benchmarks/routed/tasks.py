"""What processes of the benchmark of routed experts are asked to do, and to say."""

from dataclasses import dataclass
from enum import Enum

from benchmarks.engine_process import ReadPrompt


class Keeping(Enum):
    """Where the routed experts of a decoder are."""

    WHOLE = "all in memory, no cache"
    CACHED = "all in memory, through the cache"
    LENT = "some resident, the others computed in memory beside the device's"
    PREPACKED = "some resident, the others read from a copy of the base as it was packed"
    ON_MISS = "some resident, the others read from the disk when they are asked for, LRU"


class Figure(Enum):
    """What a process says about itself."""

    HELD = "bytes that its parts say they hold, buffers of readers among them"
    GROWN = "bytes by which its own memory grew at most since before the base was read"
    DISK = "bytes that it had the disk read"
    READ = "bytes of files that experts were read from"
    MISSES = "requests that found no resident, of 1"
    HUGE = "its own memory that lies in huge pages, of 1"


@dataclass(frozen=True, slots=True)
class Follow:
    """Read so many tokens, one after the other, from where the last task ended."""

    keeping: Keeping
    tokens: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Say a figure."""

    keeping: Keeping
    figure: Figure


RoutedTask = Follow | ReadPrompt | Tell
