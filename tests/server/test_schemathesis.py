"""Schemathesis reads the OpenAPI document and tries to find a request that belies it.

All its checks but one run, in all its phases. What no schema says, such as whether a model is there
or settings fit each other, may be refused by any status that the document names.
"""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis.engine import events, from_schema

from expertctl.engine_config import EngineConfig
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import URL, ServerHarness

pytestmark = pytest.mark.all
SEED = 20
EXAMPLES = 6
REFUSED = [
    "400",
    "401",
    "403",
    "404",
    "405",
    "408",
    "413",
    "414",
    "415",
    "421",
    "422",
    "429",
    "431",
]
ACCEPTED = ["2xx", *REFUSED]
SETTINGS = ServeSettings(timeout=0.2, engine=EngineConfig(memory_budget=64 << 20))
"""Answers may be asked for that take hours."""


def configuration(secret: str) -> schemathesis.Config:
    return schemathesis.Config.from_dict(
        {
            "seed": SEED,
            "headers": {"Authorization": f"Bearer {secret}", "Host": URL.partition("//")[2]},
            "generation": {"max-examples": EXAMPLES, "deterministic": True, "database": "none"},
            "continue-on-failure": True,
            "checks": {
                "negative_data_rejection": {"expected-statuses": REFUSED},
                "positive_data_acceptance": {"expected-statuses": ACCEPTED},
                "use_after_free": {"enabled": False},  # a cancelled job can still be read
            },
        }
    )


def run(served: ServerHarness, secret: str) -> Iterator[events.EngineEvent]:
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json",
        served.app,
        config=configuration(secret),
        headers={"Host": URL.partition("//")[2]},
    )
    yield from from_schema(schema).execute()


def failures(event: events.ScenarioFinished) -> Iterator[str]:
    for case, checks in event.recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                sent = event.recorder.interactions[case].request
                fact = check.failure_info.failure
                yield f"{sent.method} {sent.uri} {sent.body!r}: {check.name} {fact}"


def answered(event: events.ScenarioFinished) -> Iterator[int]:
    for interaction in event.recorder.interactions.values():
        if interaction.response is not None:
            yield interaction.response.status_code


def test_no_request_belies_the_openapi_document(make_served: MakeServed) -> None:
    served = make_served(SETTINGS)
    secret = served.service.keys.create("first", now=time.time(), manages=True).secret
    wrong: list[str] = []
    statuses: Counter[int] = Counter()
    for event in run(served, secret):
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            wrong += failures(event)
            statuses.update(answered(event))
    assert not wrong, "\n\n".join(wrong)
    assert statuses.total() > 300
    assert {200, 400, 401, 404, 405, 415} <= set(statuses)
