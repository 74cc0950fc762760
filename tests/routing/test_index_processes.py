"""One index in several processes: nothing is lost, and readers always find a whole one."""

import multiprocessing
import os
from pathlib import Path

import pytest

from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from tests.routing.experts import make_content_digest, make_manifest
from tests.routing.test_index import BOTH, SQL, texts
from tests.routing.vector_tables import encode_prompt

pytestmark = pytest.mark.all


def add_some(folder: Path, first: int) -> None:
    for number in range(first, first + 5):
        RoutingIndex(folder, LexicalEncoder()).add(texts(make_manifest(f"acme/e{number}")))


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_some, args=(tmp_path, n)) for n in (0, 5, 10)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    index = RoutingIndex(tmp_path, LexicalEncoder())
    assert len(index.table.digests) == 15
    index.check_integrity()


def write_much(folder: Path) -> None:
    index = RoutingIndex(folder, LexicalEncoder())
    for number in range(12):
        index.add(texts(make_manifest(f"acme/e{number}")))
        if number % 3 == 2:
            index.remove([make_content_digest(f"acme/e{number}@1.0.0")])
    index.rebuild(BOTH)


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_readers_always_find_a_whole_index_while_another_process_writes(tmp_path: Path) -> None:
    RoutingIndex(tmp_path, LexicalEncoder()).add(BOTH)
    writer = multiprocessing.get_context("spawn").Process(target=write_much, args=(tmp_path,))
    writer.start()
    for _ in range(100_000):
        reader = RoutingIndex(tmp_path, LexicalEncoder())
        found = reader.search(encode_prompt(reader, "query the orders table"))
        assert reader.table.digest_at(found.experts[0]) == make_content_digest(SQL.ref)
        if not writer.is_alive():
            break
    writer.join()
    assert writer.exitcode == 0
    last = RoutingIndex(tmp_path, LexicalEncoder())
    assert set(last.table.digests) == set(BOTH)
    last.check_integrity()
