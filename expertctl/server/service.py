"""What every route of the generation server gets."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.routing.planner import Planner
from expertctl.server.api_keys import ApiKeys
from expertctl.server.metering import Metered, Trace, untraced
from expertctl.server.metrics import Metrics
from expertctl.server.quotas import Quotas
from expertctl.server.readiness import Readiness
from expertctl.server.settings import ServeSettings

if TYPE_CHECKING:
    from expertctl.server.tracing.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine and how it is served; one for the life of the application."""

    engine: Metered
    planner: Planner
    settings: ServeSettings
    keys: ApiKeys
    metrics: Metrics
    quotas: Quotas
    readiness: Readiness = field(default_factory=Readiness)
    tracing: "Tracing | None" = None
    """Sends traces; opened and closed together with the engine."""


def service_of(
    engine: BatchEngine,
    planner: Planner,
    settings: ServeSettings,
    *,
    readiness: Readiness | None = None,
) -> Service:
    """Return the service of an engine, with nothing counted yet."""
    metrics, quotas = Metrics(), Quotas()
    tracing, trace = (None, untraced) if settings.traces is None else _traces(settings)
    return Service(
        engine=Metered(engine, metrics, quotas, trace=trace, log_prompts=settings.log_prompts),
        planner=planner,
        settings=settings,
        keys=ApiKeys(planner.home.api_keys),
        metrics=metrics,
        quotas=quotas,
        readiness=readiness or Readiness(),
        tracing=tracing,
    )


def _traces(settings: ServeSettings) -> "tuple[Tracing, Trace]":
    """Make the tracing; the extra is imported only here."""
    from expertctl.server.tracing.job_spans import traced
    from expertctl.server.tracing.tracing import Tracing

    assert settings.traces is not None
    return Tracing(settings.traces, server=settings.public_url), traced
