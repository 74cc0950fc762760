"""Opens what a command needs to run a model: the home, the base of ``--base``, and the engine.

A new home gets the starter pack. ``--base`` takes a name or a folder; a known name comes first, so
``./NAME`` means the folder of that name. Commands that run a base register an unknown folder;
`build` and `init` only read it. `chat` also uses `LoadingProgress` and `save_plan`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.output import format_count, note, warn, write_file
from expertctl.cli.process import restore_collections
from expertctl.cli.progress import LoadingBar, show_progress
from expertctl.errors import ConflictError, ExpertError, NotFoundError, format_install_command
from expertctl.settings import Settings
from expertctl.store.preference import find_working_folder

if TYPE_CHECKING:
    from expertctl.engine.local_engine import LocalEngine
    from expertctl.engine_config import EngineConfig
    from expertctl.routing.planner import Planner
    from expertctl.store.base_record import StoredBase
    from expertctl.store.bases import BaseStore


UNFINISHED_MARKER = "starter.unfinished"
"""A file below ``EXPERT_HOME`` that exists while the starter pack is being installed."""


def open_planner(settings: Settings, *, as_json: bool) -> "Planner":
    """Open the home; a new one first gets the starter pack, as an ordinary install.

    A marker file stays until that is done, so an interrupted first run is completed later.
    """
    from expertctl.errors import ignore_notification
    from expertctl.routing.base_choice import is_home_empty
    from expertctl.routing.planner import Planner

    tell = ignore_notification if as_json else note
    planner = Planner.open(settings, notify=tell, folder=find_working_folder())
    unfinished = settings.home.root / UNFINISHED_MARKER
    if is_home_empty(planner.store, planner.bases) or unfinished.exists():
        _install_starter(planner, settings, as_json=as_json)
    return planner


def install_demo(settings: Settings, *, as_json: bool) -> None:
    """Install the starter pack if neither its base nor any of its experts is installed."""
    from expertctl.routing.base_choice import lacks_starter
    from expertctl.routing.planner import Planner

    planner = Planner.open(settings)
    if lacks_starter(planner.store, planner.bases):
        _install_starter(planner, settings, as_json=as_json)


def _install_starter(planner: "Planner", settings: Settings, *, as_json: bool) -> None:
    from expertctl.files import make_folders, write_atomic
    from expertctl.install.installer import InstallContext, install_starter

    home = settings.home
    unfinished = home.root / UNFINISHED_MARKER
    make_folders(unfinished.parent, mode=0o700)
    write_atomic(unfinished, b"")
    with show_progress("installing the starter pack", None, as_json=as_json) as report:
        stores = planner.store, planner.bases, planner.trust
        context = InstallContext(*stores, home.registries, planner.catalogue, planner.index)
        installed = install_starter(context, progress=report)
    unfinished.unlink(missing_ok=True)
    warn(warning for item in installed for warning in item.warnings)
    count = format_count(len(installed), "expert")
    note(f"installed the starter pack: a base and {count}; `expertctl list` shows them")


def open_engine(
    planner: "Planner",
    config: "EngineConfig",
    *,
    progress: "LoadingBar | LoadingProgress",
) -> "LocalEngine":
    """Open the engine with nothing loaded."""
    try:
        from expertctl.engine.local_engine import LocalEngine
    except ModuleNotFoundError as error:
        raise build_missing_engine_error(error) from error
    restore_collections()
    return LocalEngine.from_config(
        planner,
        config,
        progress=progress,
        kernel_progress=progress.report_kernels,
        reading=progress.report_reading,
        tell=note,
    )


@contextmanager
def guard_engine_import(*, as_json: bool) -> Iterator[None]:
    """Show a progress bar around imports of the engine.

    Raises:
        NotFoundError: when a library that the engine needs is not installed.
    """
    with show_progress("loading", None, as_json=as_json):
        try:
            yield
        except ModuleNotFoundError as error:
            raise build_missing_engine_error(error) from error


def build_missing_engine_error(error: ModuleNotFoundError) -> ExpertError:
    """Return the error for a library of the engine that could not be imported."""
    from expertctl.engine.memory.process_registry import ENGINE_MODULES

    name = (error.name or "").partition(".")[0].replace("llvmlite", "numba")
    if name == "torch":
        return NotFoundError(
            "a CUDA device needs torch, which is not installed",
            hint=f"{format_install_command('cuda')}; or compute on the processor: --device cpu",
        )
    if name not in ENGINE_MODULES:
        raise error
    return NotFoundError(
        f"running a model needs {name}, which is not installed",
        hint=format_install_command("engine"),
    )


def resolve_base(wanted: str | None, settings: Settings, *, as_json: bool) -> str | None:
    """Return the name of the base of ``--base``, None without it; registers an unknown folder.

    The demo base is installed by the first run, or when it is named and missing.

    Raises:
        NotFoundError: when there is neither such a base nor such a folder, and none is downloaded.
        ConflictError: when the folder's name is taken by another base.
        ExpertError: when the folder holds no base.
    """
    if wanted is None:
        return None
    from expertctl.reference import DEMO_BASE
    from expertctl.routing.base_choice import is_home_empty
    from expertctl.store.bases import BaseStore
    from expertctl.store.store import Store

    bases = BaseStore(settings.home.bases)
    if wanted == DEMO_BASE:
        install_demo(settings, as_json=as_json)
    try:
        found: StoredBase | Path | NotFoundError = find_base_or_folder(bases, wanted)
    except NotFoundError as error:
        found = _find_known_model(wanted, bases) or error
    if not isinstance(found, Path | NotFoundError):
        return found.name
    starts_empty = is_home_empty(Store(settings.home.store), bases)
    if isinstance(found, Path):
        added = _add_base(bases, found, as_json=as_json)
    else:
        added = _add_model(wanted, found, settings, bases, as_json=as_json)
    if starts_empty:
        note(f"the starter pack was not installed; `--base {DEMO_BASE}` installs it")
    return added


def _find_known_model(wanted: str, bases: "BaseStore") -> "StoredBase | None":
    """Return the base that a short name, or a name with a revision, stands for."""
    from expertctl.cli.hub import find_known_model

    return find_known_model(wanted, bases)


def _add_model(
    wanted: str, error: NotFoundError, settings: Settings, bases: "BaseStore", *, as_json: bool
) -> str:
    """Register the model of a hub that ``--base`` names; return the name of the base."""
    from expertctl.cli.hub import add_model, offer_model

    model = offer_model(wanted, error, settings, bases, as_json=as_json)
    base = add_model(model, bases, as_json=as_json)
    note(f"registered the base {base.name}; `expertctl base remove {base.name}` unregisters it")
    return base.name


def find_base_or_folder(bases: "BaseStore", wanted: str) -> "StoredBase | Path":
    """Return the base with this name, folder or GGUF file; else the folder or file itself.

    Raises:
        NotFoundError: when there is neither such a base nor such a folder.
    """
    try:
        return bases.find(wanted)
    except NotFoundError:
        folder = _find_folder(wanted)
        if folder is None:
            raise
        return folder


def _find_folder(text: str) -> Path | None:
    from expertctl.package.gguf_file import is_gguf_file

    with suppress(OSError, ValueError, RuntimeError):  # a text that names no place
        folder = Path(text).expanduser()
        return folder if text.strip() and (folder.is_dir() or is_gguf_file(folder)) else None
    return None


def _add_base(bases: "BaseStore", folder: Path, *, as_json: bool) -> str:
    from expertctl.store.base_record import infer_name
    from expertctl.store.bases import count_bytes_to_read

    name, _ = infer_name(folder, None, None)
    known = next((base for base in bases.list_bases() if base.name == name), None)
    if known is not None:
        raise ConflictError(
            f"{folder} is not registered, and the name {name} is taken by {known.source}",
            hint=f"expertctl base add {folder} --name ANOTHER-NAME",
        )
    size = count_bytes_to_read(folder)
    with show_progress("hashing base", size, as_json=as_json) as report:
        base = bases.add(folder, progress=report)
    note(f"registered the base {base.name}; `expertctl base remove {base.name}` unregisters it")
    return base.name


class LoadingCancelledError(Exception):
    """The user stopped an answer while files were loaded for it."""


class LoadingProgress:
    """Reports bytes loaded for an answer, and stops loading when the user cancels the answer."""

    def __init__(self) -> None:
        """Start without a progress bar."""
        self.report: LoadingBar | None = None
        self.is_cancelled: Callable[[], bool] = lambda: False

    def __call__(self, count: int) -> None:
        """Count loaded bytes.

        Raises:
            LoadingCancelledError: when the user cancelled the answer.
        """
        if self.is_cancelled():
            raise LoadingCancelledError
        if self.report is not None:
            self.report(count)

    def report_kernels(self, done: int, total: int) -> None:
        """Show how many kernels are compiled."""
        if self.report is not None:
            self.report.report_kernels(done, total)

    def report_reading(self, done: int, total: int) -> None:
        """Show how many tokens of the prompt are read."""
        if self.report is not None:
            self.report.report_reading(done, total)


def save_plan(path: Path, document: dict[str, object]) -> None:
    """Write a plan as JSON.

    Raises:
        DiskFullError: when there is no space left.
        NotFoundError: when the file cannot be written.
    """
    text = json.dumps(document, ensure_ascii=False, indent=2)
    write_file(path, text.encode() + b"\n")
