"""What a server answers when what it was opened on goes away, fills up or cannot be written."""

import asyncio
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from expertctl.install.installed_experts import remove_base, remove_expert
from expertctl.store import locks
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, ServedPackages, ServerHarness, StreamingClient, run_app
from tests.store.fixtures import HomeFixture

INFER = "/v1/infer"
ASKED: dict[str, Any] = {"prompt": "Sort: 3, 1, 2", "max_tokens": 4, "temperature": 0}
FORCED: dict[str, Any] = {**ASKED, "force_experts": ["acme/sql"]}


def mounted(folder: str, *words: str) -> None:
    """Mount something, or skip the test where that is not allowed."""
    if subprocess.run(["mount", *words, folder], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted(folder, "-t", "tmpfs", "-o", "size=256k", "tmpfs")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def answered(served: ServerHarness, body: dict[str, Any]) -> dict[str, Any]:
    answer = served.client().post(INFER, json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_an_expert_that_is_removed_while_it_answers_answers_to_the_end(
    make_served: MakeServed,
) -> None:
    served = make_served()
    user_home = served.user_home

    async def listen() -> bytes:
        body = {**FORCED, "max_tokens": 200, "stream": True}
        async with StreamingClient(served.app, INFER, body) as listener:
            assert (await listener.read_head())[0] == 200
            said = await listener.read_chunk()
            removing = asyncio.to_thread(
                remove_expert, "acme/sql", store=user_home.store, catalogue=user_home.catalogue
            )
            await removing
            while piece := await listener.read_chunk():
                said += piece
            return said

    said = asyncio.run(listen())
    assert b"event: finished" in said
    answer = served.client().post(INFER, json=FORCED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answered(served, {**ASKED, "force_experts": ["acme/json"]})["experts_used"]


def test_a_base_that_is_removed_is_told_and_comes_back(make_served: MakeServed) -> None:
    served = make_served()
    before = answered(served, FORCED)["text"]
    user_home = served.user_home
    directory = user_home.bases.find(BASE).path
    remove_base(BASE, bases=user_home.bases, store=user_home.store, force=True)
    answer = served.client().post(INFER, json=FORCED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "no base is called 'tiny'" in answer.json()["error"]["message"]
    user_home.bases.add(directory, name=BASE)
    assert answered(served, FORCED)["text"] == before


def test_a_full_disk_costs_no_answer_and_what_is_freed_is_used(
    make_served: MakeServed, small_disk: Path
) -> None:
    """SQLite has no room there even for the index of a log; the catalogue is read without one."""
    served = make_served()
    index = served.user_home.home.index
    answered(served, FORCED)
    with closing(sqlite3.connect(index)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for path in index.parent.glob(f"{index.name}-*"):
        path.unlink()
    shutil.move(index, small_disk / index.name)
    index.symlink_to(small_disk / index.name)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * (512 << 10))
    document = answered(served, FORCED)
    assert document["text"]
    assert any("was not recorded" in warning for warning in document["warnings"])
    filler.unlink()
    assert not any("recorded" in warning for warning in answered(served, FORCED)["warnings"])


def test_a_catalogue_that_another_process_holds_costs_no_answer(
    make_served: MakeServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_served()
    answered(served, FORCED)
    monkeypatch.setattr(locks, "BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(served.user_home.home.index)) as other:
        other.execute("BEGIN EXCLUSIVE")
        document = answered(served, FORCED)
        other.rollback()
    assert any("was not recorded" in warning for warning in document["warnings"])
    assert not any("recorded" in warning for warning in answered(served, FORCED)["warnings"])


def test_a_home_that_cannot_be_written_is_served(stock: ServedPackages, tmp_path: Path) -> None:
    root = tmp_path / "home"
    stock.make_home(root)
    mounted(str(root), "--bind", str(root))
    try:
        mounted(str(root), "-o", "remount,ro,bind")
        with run_app(HomeFixture(root)) as served:
            document = answered(served, FORCED)
        assert document["experts_used"] == ["acme/sql@1.0.0"]
        assert any("was not recorded" in warning for warning in document["warnings"])
    finally:
        subprocess.run(["umount", str(root)], check=True)
