"""The value of ``--base``: the name of a base, or its folder.

One rule for every command: a known name comes first, so ``./NAME`` means the folder of that name.
Commands that run a base add a folder that is not known; `build` and `init` only read it.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.opening import open_with_demo
from expertctl.cli.output import note, progress
from expertctl.errors import ConflictError, NotFoundError
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.store.base_record import StoredBase
    from expertctl.store.bases import BaseStore


def known_base(wanted: str | None, settings: Settings, *, as_json: bool) -> str | None:
    """Return the name of the base that an option means; None without the option.

    The demo comes with the first run, or when it is named and the starter pack is not here.

    Raises:
        NotFoundError: when there is neither such a base nor such a folder.
        ConflictError: when the name of the folder is that of another base.
        ExpertError: when the folder holds no base.
    """
    if wanted is None:
        return None
    from expertctl.install.first_run import is_new
    from expertctl.routing.base_choice import DEMO
    from expertctl.store.bases import BaseStore
    from expertctl.store.store import Store

    bases = BaseStore(settings.home.bases)
    if wanted == DEMO:
        open_with_demo(settings, as_json=as_json)
    found = base_or_folder(bases, wanted)
    if not isinstance(found, Path):
        return found.name
    starts_empty = is_new(Store(settings.home.store), bases)
    added = _added(bases, found, as_json=as_json)
    if starts_empty:
        note(f"the starter pack was not installed; `--base {DEMO}` installs it")
    return added


def base_or_folder(bases: "BaseStore", wanted: str) -> "StoredBase | Path":
    """Return the base of a name, or whose files lie in a folder; else that folder.

    Raises:
        NotFoundError: when there is neither such a base nor such a folder.
    """
    try:
        return bases.find(wanted)
    except NotFoundError:
        folder = _folder(wanted)
        if folder is None:
            raise
        return folder


def _folder(text: str) -> Path | None:
    with suppress(OSError, ValueError, RuntimeError):  # a text that names no place
        folder = Path(text).expanduser()
        return folder if text.strip() and folder.is_dir() else None
    return None


def _added(bases: "BaseStore", folder: Path, *, as_json: bool) -> str:
    from expertctl.store.base_place import named

    name, _ = named(folder, None, None)
    known = next((base for base in bases.bases() if base.name == name), None)
    if known is not None:
        raise ConflictError(
            f"{folder} is not known, and another base is called {name}: {known.path}",
            hint=f"expertctl base add {folder} --name ANOTHER-NAME",
        )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with progress("hashing base", size or None, as_json=as_json) as report:
        base = bases.add(folder, progress=report)
    note(f"added the base {base.name}; `expertctl base remove {base.name}` forgets it")
    return base.name
