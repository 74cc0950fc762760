"""Schemathesis reads the OpenAPI document and tries to find a request that belies it.

All its checks run, in all its phases: examples, boundary values, random data that fits and data
that does not, and sequences of calls, as an admin and without a token.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis.engine import events, from_schema

from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import URL, Publish, RegistryHarness

pytestmark = pytest.mark.all

SEED = 20
EXAMPLES = 6
NO_PLAIN_LINE = ["2xx", "3xx", "400", "401", "403", "404", "409", "429", "5xx"]
"""What no schema says: that a reason is printable, that a PEM text holds a key."""

TEXTS = (
    "PUT /api/v1/packages/{namespace}/{name}/{version}/yank",
    "POST /api/v1/namespaces/{namespace}/keys",
    "DELETE /api/v1/namespaces/{namespace}/keys/{key_id}",
    "POST /api/v1/tokens",
)


def configuration(secret: str) -> schemathesis.Config:
    refused = ["400", "401", "403", "404", "405", "409", "413", "414", "415", "429", "431"]
    texts = {"positive_data_acceptance": {"expected-statuses": NO_PLAIN_LINE}}
    return schemathesis.Config.from_dict(
        {
            "seed": SEED,
            "headers": {"Authorization": f"Bearer {secret}", "Host": URL.partition("//")[2]},
            "generation": {
                "max-examples": EXAMPLES,
                "deterministic": True,
                "database": "none",
            },
            "continue-on-failure": True,
            "checks": {"negative_data_rejection": {"expected-statuses": refused}},
            "operations": [{"include-name": name, "checks": texts} for name in TEXTS],
        }
    )


def run(served: RegistryHarness, secret: str) -> Iterator[events.EngineEvent]:
    config = configuration(secret)
    schema = schemathesis.openapi.from_asgi(
        "/api/v1/openapi.json",
        served.app,
        config=config,
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


@pytest.fixture
def served(make_registry: NewRegistry) -> RegistryHarness:
    """A registry that does not mind how often it is asked."""
    return make_registry(requests_per_minute=10**9, failures_per_minute=10**9)


def test_no_request_belies_the_openapi_document(served: RegistryHarness, publish: Publish) -> None:
    publish("acme/acme", "1.2.0")  # the names that the document has as examples
    secret = served.create_user("boss", admin=True)
    wrong: list[str] = []
    statuses: Counter[int] = Counter()
    for event in run(served, secret):
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            wrong += failures(event)
            statuses.update(answered(event))
    assert wrong == []
    assert statuses.total() > 500
    assert {200, 201, 204, 400, 401, 404, 405, 409, 415} <= set(statuses)
