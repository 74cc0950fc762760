"""What is asked of registries, and how often."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from expertctl.errors import NotFoundError, UnreachableError
from expertctl.install.sources import Sources
from expertctl.reference import Reference
from expertctl.registry.http import Http
from expertctl.registry.retry import Retries
from tests.install.market import Buyer, market_at
from tests.registry_server.publishing.parcels import Template

INDEX = "/tuf/targets/index/acme/{}.json"


def counting(paths: Counter[str]) -> Callable[[ASGIApp], ASGIApp]:
    """Count the paths that are asked for."""

    def around(app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            paths[scope["path"]] += 1
            await app(scope, receive, send)

        return counted

    return around


def test_every_index_is_asked_for_once_however_many_are_wanted(
    tmp_path: Path, home: Path, template: Template
) -> None:
    paths: Counter[str] = Counter()
    with market_at(tmp_path / "registry", template, around=counting(paths)) as market:
        market.open("acme")
        market.sell("acme/extra@1.0.0")
        for name in "abc":
            market.sell(f"acme/{name}@1.0.0", requires=["acme/extra@^1"])
        Buyer.at(home, market).buy("acme/a", "acme/b", "acme/c")
    asked = {name: paths[INDEX.format(name)] for name in ("a", "b", "c", "extra")}
    assert asked == {"a": 1, "b": 1, "c": 1, "extra": 1}


def test_indexes_are_asked_for_once_where_what_is_installed_will_do(
    tmp_path: Path, home: Path, template: Template
) -> None:
    """What is here may have been revoked or yanked since."""
    paths: Counter[str] = Counter()
    with market_at(tmp_path / "registry", template, around=counting(paths)) as market:
        market.open("acme")
        market.sell("acme/a@1.0.0")
        market.sell("acme/b@1.0.0")
        buyer = Buyer.at(home, market)
        buyer.buy("acme/a@1.0.0", "acme/b@1.0.0")
        paths.clear()
        buyer.buy("acme/a@1.0.0", "acme/b@1.0.0")
        assert paths == {INDEX.format("a"): 1, INDEX.format("b"): 1}
    done = buyer.buy("acme/a@1.0.0", "acme/b@1.0.0")
    assert [item.outcome for item in done.installed] == ["already installed"] * 2
    assert [notice.kind for notice in done.notices] == ["unchecked"] * 2


def test_a_missing_package_among_many_is_named_as_when_it_is_alone(
    tmp_path: Path, home: Path, template: Template
) -> None:
    with market_at(tmp_path / "registry", template) as market:
        market.open("acme")
        market.sell("acme/a@1.0.0")
        buyer = Buyer.at(home, market)
        with pytest.raises(NotFoundError) as alone:
            buyer.buy("acme/gone")
        with pytest.raises(NotFoundError) as among:
            buyer.buy("acme/a", "acme/gone")
        assert among.value.message == alone.value.message
    assert buyer.refs() == []


def test_a_registry_that_has_gone_is_tried_as_often_as_for_one_package(
    tmp_path: Path, home: Path, template: Template
) -> None:
    with market_at(tmp_path / "registry", template) as market:
        buyer = Buyer.at(home, market)
    pauses: list[float] = []
    retries = Retries(attempts=3, sleep=pauses.append)
    wanted = [(Reference.parse("acme/a"), True)]
    with Http(retries=retries) as http:
        sources = Sources(http, buyer.house.trust, buyer.settings)
        with pytest.raises(UnreachableError, match=market.host):
            sources.prefetch(wanted)
    assert len(pauses) == 2
