"""``/v1/route`` and ``/v1/experts``: what would answer, and what is there."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from expertctl.engine.serving import processor
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest, parse_forced
from expertctl.schema.validation import find_problems
from expertctl.server.native.routes import CHOSEN_BASE, MAX_PENDING_PLANS
from expertctl.settings import Home, Settings
from expertctl.store.store import Store
from tests.server.conftest import MakeServed
from tests.server.harness import (
    BASE,
    EXPERTS,
    PROMPT,
    ServedPackages,
    ServerHarness,
    StreamingClient,
)


def test_a_route_is_that_of_the_command_line(served: ServerHarness) -> None:
    body = {"prompt": PROMPT, "force_experts": ["acme/sql:0.5", "acme/json"], "seed": 3}
    answer = served.client().post("/v1/route", json=body)
    assert answer.status_code == 200
    found = answer.json()
    assert find_problems(found, "route") == []
    planner = Planner.open(Settings(Home(served.user_home.root), encoder="lexical"))
    force = (parse_forced("acme/sql:0.5"), parse_forced("acme/json"))
    request = RouteRequest(prompt=PROMPT, force=force, seed=3)
    expected = planner.plan(request, base=BASE).result.to_json()
    for key in ("plan", "candidates", "encoder", "threshold", "prompt", "notes", "warnings"):
        assert found[key] == msgspec.json.decode(msgspec.json.encode(expected[key]))


def test_a_route_loads_nothing(make_served: MakeServed) -> None:
    served = make_served(None)
    client = served.client()
    client.post("/v1/route", json={"prompt": PROMPT, "force_experts": ["acme/sql"]})
    assert not any(one["in_memory"] for one in client.get("/v1/experts").json()["experts"])


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> "Busy":
    busy = Busy()
    monkeypatch.setattr(processor, "plan_request", busy)
    return busy


class Busy:
    """What makes plans, as long as a test wants; how many it was asked for."""

    def __init__(self) -> None:
        self.asked, self.began, self.may_go_on = 0, threading.Event(), threading.Event()
        self._plan: Any = processor.plan_request

    def __call__(self, *given: Any) -> Any:
        self.asked += 1
        self.began.set()
        self.may_go_on.wait()
        return self._plan(*given)


def test_plans_of_callers_who_left_are_not_made(make_served: MakeServed, busy: Busy) -> None:
    served, body = make_served(None), {"prompt": PROMPT}

    async def come_and_go() -> None:
        async with StreamingClient(served.app, "/v1/route", body):
            await asyncio.to_thread(busy.began.wait)
        for _ in range(50):
            async with StreamingClient(served.app, "/v1/route", body):
                await asyncio.sleep(0)

    asyncio.run(come_and_go())
    busy.may_go_on.set()
    answer = served.client().post("/v1/route", json=body)
    assert answer.status_code == 200
    assert busy.asked == 2, "the first, which was begun, and the last, which was waited for"


def test_one_base_is_chosen_without_a_plan(make_served: MakeServed, busy: Busy) -> None:
    busy.may_go_on.set()
    body = {"prompt": PROMPT, "base": CHOSEN_BASE, "max_tokens": 1}
    assert make_served(None).client().post("/v1/infer", json=body).status_code == 200
    assert busy.asked == 1, "that of the answer"


@pytest.mark.parametrize(
    ("path", "more", "status"), [("/v1/route", {}, 200), ("/v1/infer", {"base": CHOSEN_BASE}, 422)]
)
def test_so_many_plans_wait_at_a_time_and_no_more(
    make_served: MakeServed,
    stock: ServedPackages,
    busy: Busy,
    path: str,
    more: dict[str, str],
    status: int,
) -> None:
    served, body = make_served(None), {"prompt": PROMPT, **more}
    served.user_home.bases.add(stock.base_dir, name="newer")

    async def ask() -> list[int]:
        asking = [StreamingClient(served.app, path, body) for _ in range(MAX_PENDING_PLANS + 4)]
        for one in asking:
            await one.__aenter__()
        await asyncio.to_thread(busy.began.wait)
        heads = asyncio.as_completed([one.read_head() for one in asking])
        first = [await next(heads) for _ in range(4)]
        busy.may_go_on.set()
        rest = [await head for head in heads]
        for one in asking:
            await one.__aexit__(None, None, None)
        return [status for status, _ in (*first, *rest)]

    assert asyncio.run(ask()) == [429] * 4 + [status] * MAX_PENDING_PLANS


def test_what_only_an_answer_has_is_unknown_to_a_route(served: ServerHarness) -> None:
    answer = served.client().post("/v1/route", json={"prompt": PROMPT, "stream": True})
    assert answer.status_code == 400


def test_experts_are_those_that_are_installed(make_served: MakeServed) -> None:
    served = make_served(None)
    client = served.client()
    found = client.get("/v1/experts").json()
    assert found["base"] == BASE
    assert [one["name"] for one in found["experts"]] == sorted(EXPERTS)
    stored = {one.ref: one for one in Store(served.user_home.root / "store").scan().experts}
    for one in found["experts"]:
        expert = stored[one["ref"]]
        assert one["content_digest"] == str(expert.content_digest)
        assert one["package_digest"] == str(expert.package_digest)
        assert one["size"] == expert.size
        assert (one["fits"], one["revoked"], one["in_memory"]) == (True, False, False)
    body = {"prompt": PROMPT, "max_tokens": 1, "force_experts": ["acme/json"]}
    assert client.post("/v1/infer", json=body).status_code == 200
    after = client.get("/v1/experts").json()["experts"]
    assert [one["name"] for one in after if one["in_memory"]] == ["acme/json"]
