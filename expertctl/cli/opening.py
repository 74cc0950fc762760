"""Opening what a model is run with: the home, the starter pack in a new one, and the engine."""

from typing import TYPE_CHECKING

from expertctl.cli.output import note, progress, warn
from expertctl.errors import ExpertError, NotFoundError
from expertctl.settings import Settings

if TYPE_CHECKING:
    from expertctl.digest import Progress
    from expertctl.engine.runtime import Engine
    from expertctl.routing.planner import Planner


def open_planner(settings: Settings, *, as_json: bool) -> "Planner":
    """Open the home; a new one gets the starter pack first, through the ordinary install."""
    from expertctl.install.starter import install_starter, is_wanted
    from expertctl.routing.planner import Planner

    planner = Planner.open(settings)
    if is_wanted(planner.store, planner.bases):
        with progress("installing the starter pack", None, as_json=as_json) as report:
            installed = install_starter(
                store=planner.store,
                bases=planner.bases,
                trust=planner.trust,
                catalogue=planner.catalogue,
                index=planner.index,
                progress=report,
            )
        warn(warning for item in installed for warning in item.warnings)
        names = ", ".join(item.expert.ref for item in installed)
        note(f"installed the starter pack: {names}")
    return planner


def open_engine(planner: "Planner", *, budget: int | None, progress: "Progress") -> "Engine":
    """Begin with nothing loaded; here torch is imported."""
    try:
        from expertctl.engine.runtime import Engine
    except ModuleNotFoundError as error:
        raise without_engine(error) from error
    return Engine(planner, budget=budget, progress=progress, tell=note)


def without_engine(error: ModuleNotFoundError) -> ExpertError:
    """Say what is missing where torch or its company could not be imported, and the way out."""
    if error.name not in {"torch", "jinja2"}:
        raise error
    return NotFoundError(
        f"running a model needs {error.name}, which is not installed",
        hint="pip install 'expertctl[engine]'",
    )
