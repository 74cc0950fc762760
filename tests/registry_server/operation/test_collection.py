"""An operator collects garbage beside the server, and can see when that was done."""

import os
import time

from registry_server.access import rights
from registry_server.operation.gc import collect_garbage, preview_garbage
from tests.registry_server.harness import RegistryHarness


def test_a_collection_is_remembered_and_a_survey_is_not(served: RegistryHarness) -> None:
    stray = served.settings.uploads / ("a" * 32)
    stray.write_bytes(b"left")
    os.utime(stray, (0, 0))
    before = time.time()
    assert preview_garbage(served.settings, now=before).uploads == 1
    with served.registry.database.read() as connection:
        assert list(rights.list_audit_rows(connection, limit=5)) == []
    assert collect_garbage(served.settings, now=before).uploads == 1
    assert not stray.exists()
    with served.registry.database.read() as connection:
        (entry,) = rights.list_audit_rows(connection, limit=5)
    assert (entry.action, entry.detail) == ("registry.gc", "0 blobs, 0 bytes, 1 uploads")
    lines = (
        served.registry.metrics.render_exposition(served.registry.database).decode().splitlines()
    )
    name = "expertctl_registry_last_collection_timestamp_seconds "
    (shown,) = [float(line[len(name) :]) for line in lines if line.startswith(name)]
    assert shown >= before
