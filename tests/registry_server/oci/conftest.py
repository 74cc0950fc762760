"""A registry with an OCI namespace, `acme`, and who pushes there."""

import pytest
from starlette.testclient import TestClient

from tests.registry_server.harness import RegistryHarness


@pytest.fixture
def alice(served: RegistryHarness) -> TestClient:
    """The owner of the namespace `acme`."""
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    return served.client(secret)


@pytest.fixture
def bob(served: RegistryHarness, alice: TestClient) -> TestClient:
    """Somebody else, who owns `other` and may read `acme`."""
    secret = served.create_user("bob")
    served.create_namespace("other", owner="bob")
    return served.client(secret)
