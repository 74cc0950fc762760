"""The size of the next chunk of a prompt, by what the last one and recent steps took."""

import pytest

from expertctl.engine.running_batch import (
    CHUNK_SIZES,
    FIRST_CHUNK,
    MIN_CHUNK,
    choose_chunk_size,
    is_step_due,
)
from expertctl.engine.running_sequence import PrefillChunk

STEPS = (0.010, 0.012, 0.011)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (PrefillChunk(16, 0.011), 16),  # as long as a step
        (PrefillChunk(64, 0.110), 6),  # ten steps: a tenth
        (PrefillChunk(8, 0.002), 16),  # no more than twice as many
        (PrefillChunk(4, 9.0), MIN_CHUNK),  # however long
        (PrefillChunk(512, 0.0), 512),  # the largest there is
    ],
)
def test_a_chunk_is_made_to_last_as_long_as_a_step(last: PrefillChunk, expected: int) -> None:
    assert choose_chunk_size(last, STEPS) == expected


def test_a_prompt_of_which_nothing_is_known_begins_small() -> None:
    assert choose_chunk_size(None, STEPS) == FIRST_CHUNK
    assert choose_chunk_size(PrefillChunk(64, 1.0), ()) == FIRST_CHUNK
    assert choose_chunk_size(None, STEPS, min_tokens=128) == 128


def test_where_a_pass_can_be_cut_a_chunk_is_as_long_as_its_parts_allow() -> None:
    assert (
        choose_chunk_size(PrefillChunk(64, 0.132), STEPS, parts=30) == 64
    )  # twelve steps, 0.4 a layer
    assert choose_chunk_size(PrefillChunk(64, 0.132), STEPS, parts=2) == 4


@pytest.mark.parametrize("noise", [0.3, 1.0, 5.0])
def test_one_odd_measurement_is_made_good_within_a_few_chunks(noise: float) -> None:
    chunk = PrefillChunk(16, 0.011 * noise)
    for _ in range(4):
        chunk = PrefillChunk(size := choose_chunk_size(chunk, STEPS), size * 0.011 / 16)
    assert chunk.tokens == 16


def test_sizes_rise() -> None:
    assert sorted(set(CHUNK_SIZES)) == list(CHUNK_SIZES)


@pytest.mark.parametrize(
    ("waited", "part", "due"),
    [(0.004, 0.004, False), (0.008, 0.004, True), (0.012, 0.001, True), (0.0, 0.0, False)],
)
def test_others_step_when_the_next_part_would_make_them_wait_longer_than_a_step(
    waited: float, part: float, due: bool
) -> None:
    assert is_step_due(waited=waited, part=part, step_seconds=STEPS) is due


def test_others_step_at_once_while_no_step_was_measured() -> None:
    assert is_step_due(waited=0.0, part=0.0, step_seconds=())
