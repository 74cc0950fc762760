"""The folder of a base in GGUF: what follows from its file, and whether that is still the same."""

from collections.abc import Iterable
from pathlib import Path

from expertctl.digest import Progress
from expertctl.errors import InvalidPackageError
from expertctl.files import make_folders, open_staged_file, sync_folder
from expertctl.package.gguf_base import derive_base_files
from expertctl.package.gguf_file import read_gguf_header
from expertctl.package.stored_tensor import FileState
from expertctl.store.base_record import COPIED_GGUF, BaseFile, copy_file


def write_gguf_files(file: Path, target: Path, *, copied: bool, progress: Progress) -> FileState:
    """Write the files of a base that follow from a GGUF file into a new folder; return its state.

    With ``copied``, the folder gets a copy of the GGUF file, too; else its path.

    Raises:
        IncompatibleError: when it is not supported.
        InvalidPackageError: when it is malformed, or changes meanwhile.
    """
    place = file.absolute()
    header = read_gguf_header(place)
    files = derive_base_files(header, file=COPIED_GGUF if copied else str(place))
    make_folders(target, mode=0o700)
    for name, data in files.items():
        with open_staged_file(target / name) as write:
            write(memoryview(data))
    if copied:
        copy_file(place, target / COPIED_GGUF, progress)
    if FileState.from_stat(place.stat()) != header.state:
        raise InvalidPackageError(str(file), ["it changed while it was read"])
    sync_folder(target)
    return header.state


def check_same_file(files: Iterable[BaseFile], path: Path, state: FileState) -> None:
    """Require that a file outside the folder of a base was hashed in the state that was parsed.

    Raises:
        InvalidPackageError: when it was replaced in between.
    """
    for file in files:
        found = FileState(file.inode, file.size, file.mtime_ns)
        if file.path == str(path.absolute()) and found != state:
            raise InvalidPackageError(str(path), ["it changed while it was read"])
