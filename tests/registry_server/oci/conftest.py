"""A registry with an OCI namespace, `acme`, and who pushes there."""

import pytest
from starlette.testclient import TestClient

from tests.registry_server.served import Served


@pytest.fixture
def alice(served: Served) -> TestClient:
    """The owner of the namespace `acme`."""
    secret = served.user("alice")
    served.namespace("acme", owner="alice")
    return served.client(secret)


@pytest.fixture
def bob(served: Served, alice: TestClient) -> TestClient:
    """Somebody else, who owns `other` and may read `acme`."""
    secret = served.user("bob")
    served.namespace("other", owner="bob")
    return served.client(secret)
