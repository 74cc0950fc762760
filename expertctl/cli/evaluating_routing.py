"""``expertctl eval --routing``: how often the router is right about labelled prompts."""

from dataclasses import dataclass
from pathlib import Path

from expertctl.cli.named_base import known_base
from expertctl.cli.opening import open_planner
from expertctl.cli.output import counting, emit, warn
from expertctl.settings import load_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingAsked:
    """What the user wants to measure, demand and see."""

    data: Path
    base: str | None
    min_accuracy: float | None
    show: int
    plot: Path | None


def evaluate_routing(asked: RoutingAsked, *, as_json: bool) -> str:
    """Measure and print; return how the figures fall short of the demand, if they do."""
    from expertctl.cli.routing_evaluation_view import document, shortfall, text
    from expertctl.routing.evaluation import evaluate_routing as measure
    from expertctl.routing.labelled_prompts import read_labelled

    if asked.plot is not None:
        from expertctl.cli.plot import check_picture

        check_picture(asked.plot)
    data = read_labelled(asked.data)
    settings = load_settings()
    base = known_base(asked.base, settings, as_json=as_json)
    planner = open_planner(settings, as_json=as_json)
    with counting("routing", len(data.prompts), as_json=as_json) as report:
        found = measure(planner, data, base=base, progress=report)
    warn(found.warnings)
    if asked.plot is not None:
        from expertctl.cli.plot import write_figure
        from expertctl.cli.routing_plot import figure_of

        write_figure(lambda: figure_of(found), asked.plot)
    told = document(found, show=asked.show, min_accuracy=asked.min_accuracy)
    emit(told, text(found, show=asked.show), as_json=as_json)
    return shortfall(found, asked.min_accuracy)
