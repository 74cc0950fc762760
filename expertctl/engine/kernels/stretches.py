"""Loops over stretches of a count; where code is emitted for one, its size is a constant."""

from collections.abc import Iterator

from expertctl.engine.kernels.lanes import Lanes, Value


def stretches(lanes: Lanes, count: Value, sizes: tuple[int, ...]) -> Iterator[tuple[Value, int]]:
    """Emit what the caller emits for each size in turn, as often as it fits in what is left.

    Yields where the stretch begins, and its size; the last size is 1.
    """
    done = lanes.constant(0)
    for size in sizes:
        times = lanes.quotient(lanes.subtract(count, done), lanes.constant(size))
        with lanes.count(times) as turn:
            yield lanes.sum(done, lanes.product(turn, lanes.constant(size))), size
        done = lanes.sum(done, lanes.product(times, lanes.constant(size)))


def even_stretches(
    lanes: Lanes, count: Value, *, several: Value, most: int
) -> Iterator[tuple[Value, Value, int]]:
    """Emit what the caller emits for ``several`` stretches in turn, none longer than ``most``.

    Some may be one longer than the others, and come first. Yields the number of a stretch, where it
    begins, and its size.
    """
    size = lanes.quotient(count, lanes.most(several, lanes.constant(1)))
    longer = lanes.subtract(count, lanes.product(several, size))
    done = turns = lanes.constant(0)
    for here in range(most, 0, -1):
        above = lanes.subtract(lanes.constant(here), size)
        times = lanes.chosen(above, lanes.constant(0), lanes.subtract(several, longer))
        times = lanes.chosen(lanes.subtract(above, lanes.constant(1)), times, longer)
        with lanes.count(times) as turn:
            first = lanes.sum(done, lanes.product(turn, lanes.constant(here)))
            yield lanes.sum(turns, turn), first, here
        done = lanes.sum(done, lanes.product(times, lanes.constant(here)))
        turns = lanes.sum(turns, times)
