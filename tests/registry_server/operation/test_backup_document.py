"""backup.json: strict, for a restore believes what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.reference import Digest
from registry_server.operation.backup import BACKUP_NAME, STATE_FILES, BackupDocument

STATE = {name: Digest.compute(name.encode()) for name in STATE_FILES}
GOOD = BackupDocument("2026-11-21T00:00:00+00:00", STATE, 3, 1000)


def changed(folder: Path, **fields: Any) -> Path:
    GOOD.write(folder)
    document = json.loads((folder / BACKUP_NAME).read_text())
    (folder / BACKUP_NAME).write_text(json.dumps({**document, **fields}))
    return folder


def test_a_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    GOOD.write(tmp_path)
    assert BackupDocument.read(tmp_path) == GOOD
    assert (tmp_path / BACKUP_NAME).stat().st_mode & 0o777 == 0o600


def test_no_document_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no finished backup"):
        BackupDocument.read(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"format": None},
        {"created": 5},
        {"state": []},
        {"state": {}},
        {"state": {**{name: str(d) for name, d in STATE.items()}, "../../etc/passwd": "x"}},
        {"state": dict.fromkeys(STATE_FILES, "sha256:../../etc/passwd")},
        {"state": dict.fromkeys(STATE_FILES, 7)},
    ],
)
def test_another_document_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError):
        BackupDocument.read(changed(tmp_path, **fields))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "format": 1}', "x" * 70_000])
def test_what_is_no_document_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / BACKUP_NAME).write_text(text)
    with pytest.raises(InvalidPackageError):
        BackupDocument.read(tmp_path)
