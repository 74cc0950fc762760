"""What operators and their machines ask, and who else may."""

from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from registry_server.access.rights import Action, TokenScope
from tests.registry_server.harness import URL, RegistryHarness, create_registry, make_settings


def here(served: RegistryHarness, secret: str | None = None) -> TestClient:
    """A client that connects from this machine."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    client = TestClient(served.app, base_url=URL, client=("127.0.0.1", 5), headers=headers)
    served.clients.append(client)
    return client


def test_anybody_may_ask_whether_it_lives(served: RegistryHarness) -> None:
    answer = served.client().get("/healthz")
    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert answer.headers["cache-control"] == "no-store"


def test_a_ready_registry_says_so(served: RegistryHarness) -> None:
    answer = served.client().get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "checks": {"database": "ok", "storage": "ok", "space": "ok", "index_key": "ok"},
    }


def test_metrics_are_for_this_machine(served: RegistryHarness) -> None:
    answer = here(served).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "expertctl_registry_stored_bytes 0.0" in answer.text


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"], ids=str.lower
)
def test_a_proxy_on_this_machine_is_not_this_machine(header: str, served: RegistryHarness) -> None:
    assert here(served).get("/metrics", headers={header: "127.0.0.1"}).status_code == 401


def test_strangers_see_no_metrics(served: RegistryHarness) -> None:
    client = TestClient(served.app, base_url=URL, client=("192.0.2.1", 5))
    assert client.get("/metrics").status_code == 401
    assert served.client().get("/metrics").status_code == 401


def test_admins_see_metrics_from_anywhere(served: RegistryHarness) -> None:
    assert served.client(served.create_user("anna", admin=True)).get("/metrics").status_code == 200


def test_other_people_and_smaller_tokens_do_not(served: RegistryHarness) -> None:
    assert served.client(served.create_user("uli")).get("/metrics").status_code == 403
    served.create_user("anna", admin=True)
    small = served.create_token("anna", TokenScope(Action.READ))
    assert served.client(small).get("/metrics").status_code == 403


@pytest.mark.parametrize(
    "change", [{"url": "https://experts.example.org"}, {"trusted_proxies": ("127.0.0.1/32",)}]
)
def test_behind_a_proxy_this_machine_is_everybody(
    change: dict[str, object], tmp_path: Path
) -> None:
    settings = replace(make_settings(tmp_path / "registry"), **change)  # type: ignore[arg-type]
    served = create_registry(settings)
    try:
        assert here(served).get("/metrics").status_code == 401
        secret = served.create_user("anna", admin=True)
        assert here(served, secret).get("/metrics").status_code == 200
    finally:
        served.close()
