"""The records of running servers: private, alive, of this machine, or not used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.settings import Home, Settings
from expertctl.store.server_record import (
    ServerRegistration,
    create_nonce,
    create_secret,
    derive_key,
    describe_home_policy,
    identify_machine,
    is_owner_key,
    is_proof,
    list_servers,
    make_proof,
    read_process_start,
)

URL = "http://127.0.0.1:8000"
SECRET = create_secret()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "servers"


def publish(folder: Path, *, pid: int = os.getpid(), base: str = "tiny") -> ServerRegistration:
    registration = ServerRegistration(folder, secret=SECRET)
    registration.publish(pid=pid, url=URL, base=base, policy={"dtype": None})
    return registration


def change(folder: Path, **fields: object) -> Path:
    [path] = folder.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def end_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_record_is_there_from_publishing_to_withdrawing(folder: Path) -> None:
    registration = publish(folder)
    [record] = list_servers(folder).records
    assert (record.url, record.base, record.policy) == (URL, "tiny", {"dtype": None})
    assert (record.pid, record.began) == (os.getpid(), read_process_start(os.getpid()))
    [path] = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    registration.withdraw()
    registration.withdraw()
    assert list(folder.iterdir()) == []


def test_the_secret_is_in_no_text(folder: Path) -> None:
    publish(folder)
    [record] = list_servers(folder).records
    assert record.secret == SECRET
    assert SECRET not in f"{record!r} {record} {list_servers(folder)}"


def test_a_record_of_a_process_that_has_ended_is_removed(folder: Path) -> None:
    publish(folder, pid=end_process())
    assert list_servers(folder).records == ()
    assert list(folder.iterdir()) == []


def test_a_process_with_the_id_of_an_ended_one_is_another(folder: Path) -> None:
    publish(folder)
    change(folder, began=1)
    assert list_servers(folder).records == ()
    assert list(folder.iterdir()) == []


def test_a_new_server_removes_the_records_of_dead_ones(folder: Path) -> None:
    publish(folder, pid=end_process())
    publish(folder)
    assert len(list(folder.iterdir())) == 1


def test_every_live_server_is_listed(folder: Path) -> None:
    publish(folder, base="one")
    publish(folder, base="two")
    assert {record.base for record in list_servers(folder).records} == {"one", "two"}


@pytest.mark.parametrize("machine", ["another", ""])
def test_a_record_of_another_machine_stays_there_unused(folder: Path, machine: str) -> None:
    publish(folder)
    path = change(folder, machine=machine)
    assert list_servers(folder).records == ()
    assert path.exists()
    assert identify_machine() == identify_machine()


def test_old_records_of_other_machines_hide_no_server_and_are_removed(folder: Path) -> None:
    publish(folder)
    path = change(folder, machine="another")
    for number in range(150):
        other = path.with_name(f"0-{number}.json")
        other.write_bytes(path.read_bytes())
        other.chmod(0o600)
        os.utime(other, (number, number))
    publish(folder, base="here")
    assert [record.base for record in list_servers(folder).records] == ["here"]
    assert len(list(folder.iterdir())) == 2, "the young one of the other machine stays"
    for number in range(150):
        path.with_name(f"0-{number}.json").write_bytes(b"")
        os.utime(path.with_name(f"0-{number}.json"), (number, number))
    assert [record.base for record in list_servers(folder).records] == ["here"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_record_that_others_may_read_or_write_is_a_problem(folder: Path, mode: int) -> None:
    publish(folder)
    [path] = folder.iterdir()
    path.chmod(mode)
    found = list_servers(folder)
    assert found.records == ()
    assert found.problems == (f"{path} is not used: others may read it; restart the server",)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_record_of_another_user_is_a_problem(folder: Path) -> None:
    publish(folder)
    [path] = folder.iterdir()
    os.chown(path, 12345, -1)
    assert list_servers(folder).problems == (f"{path} is not used: it is not a file of yours",)
    os.chown(folder, 12345, -1)
    [problem] = list_servers(folder).problems
    assert problem.startswith(f"{folder} is not used")


def test_a_folder_that_others_may_write_is_a_problem(folder: Path) -> None:
    publish(folder)
    folder.chmod(0o777)
    found = list_servers(folder)
    assert (found.records, len(found.problems)) == ((), 1)


def test_a_link_is_no_record(folder: Path, tmp_path: Path) -> None:
    publish(folder)
    [path] = folder.iterdir()
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    found = list_servers(folder)
    assert (found.records, len(found.problems)) == ((), 1)


def test_a_pipe_is_no_record_and_blocks_nobody(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / "1-a.json", 0o600)
    assert len(list_servers(folder).problems) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 10_000,
        b'{"pid": "x"}',
        b"\xff",
        b'{"format": 1, "pid": -1, "began": null, "machine": "m", "url": "u", "base": "b", '
        b'"policy": {}, "secret": "zz"}',
    ],
)
def test_what_is_no_record_is_left_out(folder: Path, content: bytes) -> None:
    publish(folder)
    [path] = folder.iterdir()
    path.write_bytes(content)
    assert list_servers(folder).records == ()


def test_a_record_of_another_version_is_left_out(folder: Path) -> None:
    publish(folder)
    change(folder, format=2)
    assert list_servers(folder).records == ()


def test_a_home_without_servers_has_none(folder: Path) -> None:
    assert list_servers(folder).records == ()
    assert not folder.exists()


def test_a_proof_needs_the_secret_and_is_for_one_nonce() -> None:
    nonce = create_nonce()
    proof = make_proof(SECRET, nonce)
    assert is_proof(SECRET, nonce, proof)
    assert not is_proof(SECRET, create_nonce(), proof)
    assert not is_proof(create_secret(), nonce, proof)
    assert not is_proof(SECRET, nonce, "\udc80é")


def test_the_key_of_the_owner_is_neither_the_secret_nor_a_proof() -> None:
    key = derive_key(SECRET)
    assert is_owner_key(SECRET, key)
    assert SECRET not in key
    for other in (SECRET, "", key[:-1], derive_key(create_secret()), make_proof(SECRET, "owner")):
        assert not is_owner_key(SECRET, other)


def test_the_policy_names_the_project_and_the_settings_of_routing(tmp_path: Path) -> None:
    home, project = Home(tmp_path / "home"), tmp_path / "project"
    home.root.mkdir()
    project.mkdir()
    settings = Settings(home, base="acme/base", encoder="static")
    plain = {"encoder": "static", "preferred_base": "acme/base", "project": None}
    assert describe_home_policy(settings, project) == plain
    assert describe_home_policy(settings, None) == plain
    (project / "experts.toml").write_text("")
    assert describe_home_policy(settings, project) == plain | {"project": str(project)}
