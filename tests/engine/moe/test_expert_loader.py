"""What becomes of experts who are on their way when something goes wrong beside them."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import closing
from threading import Event

import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_loader import ExpertLoader
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory, Numbers
from expertctl.errors import InvalidPackageError
from expertctl.store.quantised_file import always_wanted
from tests.engine.moe.test_expert_cache import EXPERTS, LAYERS, NUMBERS, Marked, Slow


@pytest.fixture
def memory() -> ExpertMemory:
    """Three blocks."""
    return ExpertMemory(
        ExpertShape(Scheme.FLOAT32, 16, 16), layers=LAYERS, experts=EXPERTS, blocks=3
    )


def arriving(memory: ExpertMemory, reader: Marked) -> closing[ExpertLoader]:
    return closing(ExpertLoader(memory, reader, NUMBERS, threads=2))


def check(memory: ExpertMemory, arrivals: ExpertLoader, *there: Expert) -> None:
    """All blocks are known, and whoever is there is who he should be."""
    memory.check_integrity(coming=len(arrivals))  # nobody has a slot
    for expert in there:
        assert expert in memory
        layer, name = expert
        mark = ctypes.c_uint8.from_address(int(memory.places[expert])).value
        assert mark == 16 * NUMBERS[layer] + name


@pytest.fixture(params=[RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def no_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next thread that reads does not start; what it was to do is in its queue by then."""
    start, errors = threading.Thread.start, [request.param]

    def started(self: threading.Thread) -> None:
        if errors and self.name.startswith("experts"):
            raise errors.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    yield
    assert not errors


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("foreseen", [False, True])
def test_who_found_no_thread_is_read_into_the_block_of_nobody_else(
    foreseen: bool, memory: ExpertMemory
) -> None:
    first: Expert = (1, 6)
    others: list[Expert] = [(0, 1), (0, 2), (0, 3)]
    with arriving(memory, Marked()) as arrivals:
        ask = arrivals.prefetch if foreseen else arrivals.start_reads
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            ask([first], frozenset())
        check(memory, arrivals)
        arrivals.start_reads(others[:2], frozenset(others))
        arrivals.prefetch(others[2:], frozenset(others))
        arrivals.finish_reads(others, frozenset(others))
        check(memory, arrivals, *others)
        assert first not in memory


class Halting(Marked):
    """Cannot read two experts: the one at once, the other as soon as it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = Event()
        self._tried = set[int]()

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        if expert in {1, 2} and expert not in self._tried:
            self._tried.add(expert)
            if expert == 2:
                assert self.goes_on.wait(120)
            raise InvalidPackageError("model.safetensors", ["it is cut short"])
        return super().read(layer, expert, block, is_wanted=is_wanted)


def test_what_failed_for_somebody_else_is_read_again(memory: ExpertMemory) -> None:
    """A pass fails by its first expert; its second one fails when the next pass wants him."""
    reader, wanted = Halting(), [(0, 1), (0, 2)]
    with arriving(memory, reader) as arrivals:
        arrivals.start_reads(wanted, frozenset(wanted))
        with pytest.raises(InvalidPackageError):
            arrivals.finish_reads(wanted, frozenset(wanted))
        arrivals.start_reads(wanted, frozenset(wanted))
        reader.goes_on.set()
        arrivals.finish_reads(wanted, frozenset(wanted))
        check(memory, arrivals, *wanted)


def test_what_fails_for_whoever_wants_it_is_told(memory: ExpertMemory) -> None:
    reader, wanted = Marked(), [(0, 1)]
    reader.fails = True
    with arriving(memory, reader) as arrivals:
        for _ in range(2):
            arrivals.start_reads(wanted, frozenset(wanted))
            with pytest.raises(InvalidPackageError, match="cut short"):
                arrivals.finish_reads(wanted, frozenset(wanted))
            check(memory, arrivals)


def test_who_was_cancelled_and_not_forgotten_leaves_his_block(memory: ExpertMemory) -> None:
    """Somebody interrupted between the two."""
    slow, behind = (0, 1), (0, 2)
    reader = Slow((NUMBERS[0], 1))
    with arriving(memory, reader) as arrivals:
        arrivals.prefetch([slow, behind], frozenset())
        assert reader.has_begun.wait(120)
        assert arrivals._pending[behind].future.cancel()
        reader.goes_on.set()
        arrivals.finish_reads([slow, behind], frozenset())
        check(memory, arrivals, slow)
        assert behind not in memory
