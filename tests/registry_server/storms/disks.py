"""File systems in memory, which fill and go away as disks do."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MEGABYTES = 24


@dataclass(frozen=True)
class Disk:
    """A small file system at ``folder``, and once more at ``behind``, where it always stays."""

    folder: Path
    behind: Path

    @property
    def free(self) -> int:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize

    def fill(self, *, but: int = 0) -> None:
        """Fill it up to so many bytes."""
        (self.behind / "filler").write_bytes(bytes(self.free - but))

    def clear(self) -> None:
        """Take the filling away."""
        (self.behind / "filler").unlink()

    def take_away(self) -> None:
        """Leave an empty folder, as a disk does that is gone; open files stay open."""
        _run("umount", "--lazy", str(self.folder))

    def put_back(self) -> None:
        _run("mount", "--bind", str(self.behind), str(self.folder))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of a few megabytes."""
    made = Disk(tmp_path / "disk", tmp_path / "behind")
    for folder in (made.folder, made.behind):
        folder.mkdir()
    size = f"size={MEGABYTES}m"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(made.behind)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        made.put_back()
        yield made
    finally:
        for folder in (made.folder, made.behind):
            subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
