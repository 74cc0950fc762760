"""Searches for garbage, in processes of their own: what is set there is of the whole process."""

import subprocess
import sys


def said_by(program: str) -> list[str]:
    command = [sys.executable, "-c", "import gc\nfrom expertctl.cli import process\n" + program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


MAKE_CYCLES = """
import weakref
class Node: pass
def cycle():
    node = Node(); node.itself = node
    return weakref.ref(node)
def survivors():
    made = [cycle() for _ in range(20_000)]
    return sum(one() is not None for one in made)
"""


def test_a_command_that_starts_is_not_searched_and_one_that_runs_is() -> None:
    program = """
process.reduce_collections()
print(survivors() == 20_000)
process.restore_collections()
print(survivors() < 2_000)
"""
    assert said_by(MAKE_CYCLES + program) == ["True", "True"]


def test_what_is_there_when_it_runs_is_never_looked_at_again() -> None:
    program = """
process.reduce_collections()
before = cycle()
process.restore_collections()
after = cycle()
gc.collect()
print(before() is not None, after() is None)
"""
    assert said_by(MAKE_CYCLES + program) == ["True", "True"]


def test_a_process_that_did_not_begin_as_a_command_keeps_its_settings() -> None:
    program = """
gc.set_threshold(77)
kept = cycle()
process.restore_collections()
print(gc.get_threshold()[0], gc.get_freeze_count())
"""
    assert said_by(MAKE_CYCLES + program) == ["77", "0"]
