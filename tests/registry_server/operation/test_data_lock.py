"""One server at a time on a data folder."""

import os
from pathlib import Path

import pytest

from expertctl.errors import StoreError
from registry_server.settings import SERVE_LOCK_NAME, lock_data_folder


def test_a_second_server_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with lock_data_folder(tmp_path):
        with (
            pytest.raises(StoreError, match="a server runs") as caught,
            lock_data_folder(tmp_path, wait_seconds=0),
        ):
            pass
        assert "end it" in caught.value.hint
    with lock_data_folder(tmp_path, wait_seconds=0):
        pass


def test_a_lock_file_that_nobody_holds_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / SERVE_LOCK_NAME).write_text("12345")
    with lock_data_folder(tmp_path, wait_seconds=0):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission"), lock_data_folder(tmp_path, wait_seconds=0):
        pass


def test_the_lock_is_for_its_owner_alone(tmp_path: Path) -> None:
    with lock_data_folder(tmp_path):
        assert (tmp_path / SERVE_LOCK_NAME).stat().st_mode & 0o077 == 0
