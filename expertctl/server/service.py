"""What every route of the generation server is given."""

from dataclasses import dataclass, field

from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.routing.planner import Planner
from expertctl.server.api_keys import ApiKeys
from expertctl.server.metering import Metered
from expertctl.server.metrics import Metrics
from expertctl.server.quotas import Quotas
from expertctl.server.readiness import Readiness
from expertctl.server.settings import ServeSettings


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


def service_of(
    engine: BatchEngine,
    planner: Planner,
    settings: ServeSettings,
    *,
    readiness: Readiness | None = None,
) -> Service:
    """Return what routes are given of an engine, with nothing counted yet."""
    metrics, quotas = Metrics(), Quotas()
    return Service(
        engine=Metered(engine, metrics, quotas, log_prompts=settings.log_prompts),
        planner=planner,
        settings=settings,
        keys=ApiKeys(planner.home.api_keys),
        metrics=metrics,
        quotas=quotas,
        readiness=readiness or Readiness(),
    )
