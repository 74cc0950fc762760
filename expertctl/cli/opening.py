"""Opens what a model needs to run: the home, with the starter pack if new, and the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.garbage import search_as_usual
from expertctl.cli.output import note, progress, warn
from expertctl.errors import ExpertError, NotFoundError
from expertctl.settings import Settings
from expertctl.store.preference import working_folder

if TYPE_CHECKING:
    from expertctl.digest import Progress
    from expertctl.engine.moe.start import StartWishes
    from expertctl.engine.runtime import Engine
    from expertctl.routing.planner import Planner
    from expertctl.routing.request import DeviceName

UNFINISHED = "starter.unfinished"
"""A file below ``EXPERT_HOME`` that exists while the starter pack is being installed."""


def open_planner(settings: Settings, *, as_json: bool) -> "Planner":
    """Open the home; a new one gets the starter pack first, through the ordinary install.

    A file marks the home until that is done, so that an interrupted first run is completed later.
    """
    from expertctl.install.first_run import is_new
    from expertctl.routing.planner import Planner
    from expertctl.telling import tell_nobody

    tell = tell_nobody if as_json else note
    planner = Planner.open(settings, tell=tell, folder=working_folder())
    unfinished = settings.home.root / UNFINISHED
    if is_new(planner.store, planner.bases) or unfinished.exists():
        _install_starter(planner, unfinished, as_json=as_json)
    return planner


def open_with_demo(settings: Settings, *, as_json: bool) -> None:
    """Install the starter pack where neither its base nor any of its experts is here."""
    from expertctl.install.first_run import lacks_starter
    from expertctl.routing.planner import Planner

    planner = Planner.open(settings)
    if lacks_starter(planner.store, planner.bases):
        _install_starter(planner, settings.home.root / UNFINISHED, as_json=as_json)


def _install_starter(planner: "Planner", unfinished: Path, *, as_json: bool) -> None:
    from expertctl.durable import make_folders, write_atomic
    from expertctl.install.starter import install_starter

    make_folders(unfinished.parent, mode=0o700)
    write_atomic(unfinished, b"")
    with progress("installing the starter pack", None, as_json=as_json) as report:
        installed = install_starter(
            store=planner.store,
            bases=planner.bases,
            trust=planner.trust,
            catalogue=planner.catalogue,
            index=planner.index,
            progress=report,
        )
    unfinished.unlink(missing_ok=True)
    warn(warning for item in installed for warning in item.warnings)
    names = ", ".join(item.expert.ref for item in installed)
    note(f"installed the starter pack: {names}")


def open_engine(
    planner: "Planner",
    *,
    budget: int | None,
    progress: "Progress",
    device: "DeviceName" = "cpu",
    moe: "StartWishes | None" = None,
) -> "Engine":
    """Open the engine with nothing loaded, importing torch. ``moe``: how routed experts start."""
    try:
        from expertctl.engine.moe.start import USUAL
        from expertctl.engine.runtime import Engine
    except ModuleNotFoundError as error:
        raise without_engine(error) from error
    search_as_usual()
    return Engine(
        planner, budget=budget, progress=progress, tell=note, device=device, moe=moe or USUAL
    )


@contextmanager
def importing_engine(*, as_json: bool) -> Iterator[None]:
    """Show a bar around imports of the engine: torch takes a while.

    Raises:
        NotFoundError: when a library that the engine needs is not installed.
    """
    from expertctl.engine.torch_library import map_ahead

    map_ahead()
    with progress("loading", None, as_json=as_json):
        try:
            yield
        except ModuleNotFoundError as error:
            raise without_engine(error) from error


def without_engine(error: ModuleNotFoundError) -> ExpertError:
    """Return the error for a library of the engine that could not be imported."""
    from expertctl.engine.extra import ENGINE_MODULES

    if error.name not in ENGINE_MODULES:
        raise error
    return NotFoundError(
        f"running a model needs {error.name}, which is not installed",
        hint="pip install 'expertctl[engine]'",
    )
