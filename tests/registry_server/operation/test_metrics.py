"""Counters, alone and shared between processes."""

import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import insert

from registry_server.database.tables import BLOBS
from registry_server.operation.metrics import SHARED_FOLDER
from tests.registry_server.harness import RegistryHarness


def read_exposition(served: RegistryHarness) -> dict[str, float]:
    lines = (
        served.registry.metrics.render_exposition(served.registry.database).decode().splitlines()
    )
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("expertctl_registry_"): float(value) for name, value in pairs}


def test_what_is_held_is_counted_when_asked(served: RegistryHarness) -> None:
    served.create_user("uli")
    served.create_namespace("acme")
    with served.registry.database.write() as connection:
        for number in range(3):
            row = {"digest": f"sha256:{number:064x}", "size": 10, "created": time.time()}
            connection.execute(insert(BLOBS).values(row))
    values = read_exposition(served)
    names = ("users", "namespaces", "packages", "releases", "blobs", "uploads_open")
    assert [values[name] for name in names] == [1, 1, 0, 0, 3, 0]
    assert values["stored_bytes"] == 30
    assert values["last_collection_timestamp_seconds"] == 0


def test_what_happens_is_counted(served: RegistryHarness) -> None:
    metrics = served.registry.metrics
    metrics.publishes.inc()
    metrics.uploads.inc(2)
    metrics.count_request(method="GET", route="/x", status=200, seconds=0.004, received=5, sent=7)
    metrics.count_request(method="BREW", route="/x", status=418, seconds=200, received=0, sent=0)
    values = read_exposition(served)
    assert values["publishes_total"] == 1
    assert values["uploads_total"] == 2
    assert values["received_bytes_total"] == 5
    assert values["sent_bytes_total"] == 7
    assert values['requests_total{method="GET",route="/x",status="200"}'] == 1
    assert values['requests_total{method="other",route="/x",status="418"}'] == 1
    assert values['request_seconds_bucket{le="0.005",method="GET",route="/x"}'] == 1
    assert values['request_seconds_bucket{le="120.0",method="other",route="/x"}'] == 0


def test_registries_in_one_process_count_apart(served: RegistryHarness) -> None:
    other = served.reopen()
    served.registry.metrics.publishes.inc()
    assert read_exposition(other)["publishes_total"] == 0
    other.close()


def test_workers_count_together(tmp_path: Path) -> None:
    """Two processes that share a folder show one sum, which both can tell."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from registry_server.database.connection import Database\n"
        "from registry_server.operation.metrics import RegistryMetrics\n"
        "metrics = RegistryMetrics(); metrics.publishes.inc(); metrics.running.inc()\n"
        "database = Database.open(Path(sys.argv[1]))\n"
        "print(metrics.render_exposition(database).decode()); database.close()\n"
    )
    (tmp_path / "counts").mkdir()
    environment = {SHARED_FOLDER: str(tmp_path / "counts"), "PATH": ""}
    command = [sys.executable, "-c", program, str(tmp_path / "registry.db")]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert "expertctl_registry_publishes_total 1.0" in outputs[0]
    assert "expertctl_registry_publishes_total 2.0" in outputs[1]
    assert "expertctl_registry_users 0.0" in outputs[1]
