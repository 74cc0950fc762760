"""FILE or REF, an argument of several commands, read with a progress bar."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.output import progress
from expertctl.digest import Progress
from expertctl.package.read import PackageContents, names_file, read_package
from expertctl.settings import load_settings
from expertctl.store.contents import read_stored
from expertctl.store.preference import read_preference, working_folder
from expertctl.store.store import Store, parse_wanted

Target = Annotated[
    str, typer.Argument(metavar="FILE|REF", help="A .expert file, or an installed expert.")
]


def the_store() -> Store:
    """Return the store of this home; it prefers the versions that the working folder names."""
    home = load_settings().home
    return Store(home.store, read_preference(home, working_folder()))


def read_target(target: str, *, label: str, as_json: bool) -> PackageContents:
    """Read a file or an installed expert whole."""
    if names_file(target):
        with reading(label, Path(target), as_json=as_json) as report:
            return read_package(Path(target), progress=report)
    store = the_store()
    expert = store.find(parse_wanted(target))
    with progress(label, expert.size, as_json=as_json) as report:
        return read_stored(store, expert, progress=report)


@contextmanager
def reading(label: str, file: Path, *, as_json: bool) -> Iterator[Progress]:
    """Show the progress of reading a file."""
    total = file.stat().st_size if file.is_file() else None
    with progress(label, total, as_json=as_json) as report:
        yield report
