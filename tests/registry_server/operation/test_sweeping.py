"""Uploads that nobody continues are removed by time, whether or not others begin."""

import logging
import os

import anyio
import pytest

from expertctl.errors import StoreError
from registry_server import app as module
from registry_server.app import SWEEP_SECONDS, run_periodic_tasks, sweep_uploads
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness


@pytest.fixture
def registry(served: RegistryHarness) -> Registry:
    return served.registry


def abandoned(registry: Registry, name: str) -> None:
    """An upload as a server that was killed left it, long ago."""
    path = registry.settings.uploads / name
    path.write_bytes(b"half")
    os.utime(path, (0, 0))


def left(registry: Registry) -> list[str]:
    return sorted(path.name for path in registry.settings.uploads.iterdir())


def test_uploads_are_swept_before_the_first_request_and_after_each_pause(
    registry: Registry,
) -> None:
    seen: list[list[str]] = []
    pauses: list[float] = []

    async def run() -> None:
        swept = anyio.Event()

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                seen.append(left(registry))
                swept.set()
                await anyio.sleep_forever()
            abandoned(registry, "second")

        abandoned(registry, "first")
        async with run_periodic_tasks(registry, pause=pause):
            seen.append(left(registry))
            await swept.wait()

    anyio.run(run)
    assert seen == [[], []]
    assert pauses == [SWEEP_SECONDS, SWEEP_SECONDS]


def test_an_upload_that_goes_on_stays(registry: Registry) -> None:
    (registry.settings.uploads / "young").write_bytes(b"half")
    sweep_uploads(registry)
    assert left(registry) == ["young"]


def test_what_cannot_be_swept_is_logged_and_goes_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(module, "remove_stale_uploads", fail)
    with caplog.at_level(logging.WARNING):
        sweep_uploads(registry)
    assert "the disk is gone" in caplog.text


def test_nothing_is_written_while_nothing_is_stale(registry: Registry) -> None:
    before = registry.database.version()
    sweep_uploads(registry)
    assert registry.database.version() == before
