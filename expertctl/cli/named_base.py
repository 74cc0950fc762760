"""The value of ``--base``: the name of a base, or a folder, which is added if it is not known."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.opening import open_planner
from expertctl.cli.output import note, progress
from expertctl.errors import ConflictError, NotFoundError
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.store.bases import BaseStore


def known_base(wanted: str | None, settings: Settings, *, as_json: bool) -> str | None:
    """Return the name of the base that an option means; None without the option.

    A known name wins over a folder of the same name in the current directory. The demo comes with
    the first run, so a new home gets it when it is named.

    Raises:
        NotFoundError: when there is neither such a base nor such a folder.
        ConflictError: when the name of the folder is that of another base.
        ExpertError: when the folder holds no base.
    """
    if wanted is None:
        return None
    from expertctl.routing.base_choice import DEMO
    from expertctl.store.bases import BaseStore

    bases = BaseStore(settings.home.bases)
    if wanted == DEMO and not bases.bases():
        open_planner(settings, as_json=as_json)
    try:
        return bases.find(wanted).name
    except NotFoundError:
        folder = _folder(wanted)
        if folder is None:
            raise
    return _added(bases, folder, as_json=as_json)


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
