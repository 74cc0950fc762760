"""What is asked of registries, and how often."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from expertctl.errors import NotFoundError, UnreachableError
from expertctl.install.sources import RegistrySources
from expertctl.reference import Reference
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.http import RegistryHttp
from tests.install.fixtures import InstallClient, run_publishing_registry
from tests.registry_server.publishing.package_fixtures import PackageTemplate

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
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    paths: Counter[str] = Counter()
    with run_publishing_registry(
        tmp_path / "registry", template, middleware=counting(paths)
    ) as publisher:
        publisher.create_namespace("acme")
        publisher.publish("acme/extra@1.0.0")
        for name in "abc":
            publisher.publish(f"acme/{name}@1.0.0", requires=["acme/extra@^1"])
        InstallClient.create(home, publisher).install("acme/a", "acme/b", "acme/c")
    asked = {name: paths[INDEX.format(name)] for name in ("a", "b", "c", "extra")}
    assert asked == {"a": 1, "b": 1, "c": 1, "extra": 1}


def test_indexes_are_asked_for_once_where_what_is_installed_will_do(
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    """What is here may have been revoked or yanked since."""
    paths: Counter[str] = Counter()
    with run_publishing_registry(
        tmp_path / "registry", template, middleware=counting(paths)
    ) as publisher:
        publisher.create_namespace("acme")
        publisher.publish("acme/a@1.0.0")
        publisher.publish("acme/b@1.0.0")
        buyer = InstallClient.create(home, publisher)
        buyer.install("acme/a@1.0.0", "acme/b@1.0.0")
        paths.clear()
        buyer.install("acme/a@1.0.0", "acme/b@1.0.0")
        assert paths == {INDEX.format("a"): 1, INDEX.format("b"): 1}
    done = buyer.install("acme/a@1.0.0", "acme/b@1.0.0")
    assert [item.outcome for item in done.installed] == ["already installed"] * 2
    assert [notice.kind for notice in done.notices] == ["unchecked"] * 2


def test_a_missing_package_among_many_is_named_as_when_it_is_alone(
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    with run_publishing_registry(tmp_path / "registry", template) as publisher:
        publisher.create_namespace("acme")
        publisher.publish("acme/a@1.0.0")
        buyer = InstallClient.create(home, publisher)
        with pytest.raises(NotFoundError) as alone:
            buyer.install("acme/gone")
        with pytest.raises(NotFoundError) as among:
            buyer.install("acme/a", "acme/gone")
        assert among.value.message == alone.value.message
    assert buyer.refs() == []


def test_a_registry_that_has_gone_is_tried_as_often_as_for_one_package(
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    with run_publishing_registry(tmp_path / "registry", template) as publisher:
        buyer = InstallClient.create(home, publisher)
    pauses: list[float] = []
    retries = RetrySchedule(attempts=3, sleep=pauses.append)
    wanted = [(Reference.parse("acme/a"), True)]
    with RegistryHttp(retries=retries) as http:
        sources = RegistrySources(http, buyer.user_home.trust, buyer.settings)
        with pytest.raises(UnreachableError, match=publisher.host):
            sources.prefetch(wanted)
    assert len(pauses) == 2
