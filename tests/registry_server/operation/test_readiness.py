"""The registry looks at what it needs, names what is wrong, and refuses to go on without."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.api.routes import probe_readiness
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import RegistryHarness

Harm = Callable[[RegistryHarness], object]


def remove_key(served: RegistryHarness) -> None:
    served.settings.index_key.unlink()


def open_key(served: RegistryHarness) -> None:
    served.settings.index_key.chmod(0o644)


def swap_key(served: RegistryHarness) -> None:
    served.settings.index_key.write_bytes(PrivateKey.generate().pem())


def remove_blobs(served: RegistryHarness) -> None:
    shutil.rmtree(served.settings.blobs)


def remove_uploads(served: RegistryHarness) -> None:
    shutil.rmtree(served.settings.uploads)


def remove_database(served: RegistryHarness) -> None:
    served.settings.database.unlink()


def ruin_database(served: RegistryHarness) -> None:
    with closing(sqlite3.connect(served.settings.database)) as connection:
        connection.execute("DROP TABLE users")


HARMS: list[tuple[Harm, str]] = [
    (remove_key, "index_key"),
    (open_key, "index_key"),
    (swap_key, "index_key"),
    (remove_blobs, "storage"),
    (remove_uploads, "storage"),
    (remove_database, "database"),
    (ruin_database, "database"),
]


def bad(served: RegistryHarness) -> list[str]:
    return [check.name for check in probe_readiness(served.registry) if not check.ok]


def test_a_registry_as_it_was_made_is_ready(served: RegistryHarness) -> None:
    assert bad(served) == []
    assert [p.name for p in served.settings.blobs.iterdir()] == []


@pytest.mark.parametrize(("harm", "name"), HARMS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_named_and_nothing_is_shown_to_strangers(
    harm: Harm, name: str, served: RegistryHarness
) -> None:
    """Attack 88: a backend that goes away; health says so."""
    harm(served)
    assert name in bad(served)
    answer = served.client().get("/readyz")
    document = answer.json()
    assert (answer.status_code, document["ready"]) == (503, False)
    assert document["checks"][name] != "ok"
    assert str(served.settings.data) not in answer.text
    assert served.client().get("/healthz").status_code == 200


def test_a_disk_that_fills_is_named(make_registry: NewRegistry) -> None:
    served = make_registry(free_bytes=1 << 60)
    assert bad(served) == ["space"]
    assert "there is too little free space" in served.client().get("/readyz").text


def test_a_disk_that_comes_back_is_seen_without_a_restart(served: RegistryHarness) -> None:
    kept = served.settings.blobs.rename(served.settings.data / "away")
    assert bad(served) == ["storage"]
    kept.rename(served.settings.blobs)
    assert bad(served) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(served: RegistryHarness) -> None:
    served.settings.uploads.chmod(0o500)
    assert bad(served) == ["storage"]


def test_a_data_folder_that_is_gone_is_all_wrong(served: RegistryHarness, tmp_path: Path) -> None:
    gone = replace(served.registry, settings=replace(served.settings, data=tmp_path / "gone"))
    names = [check.name for check in probe_readiness(gone) if not check.ok]
    assert names == ["database", "storage", "space", "index_key"]
