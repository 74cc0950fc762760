import time

import pytest
from sqlalchemy import Connection

from registry_server.access import rights
from registry_server.access.rights import ANONYMOUS, AuditRow, Identity
from tests.registry_server.harness import RegistryHarness


def test_a_record_says_who_from_where_what_and_when(connection: Connection) -> None:
    identity = Identity(1, "boss", True, "00ff", address="192.0.2.7")
    rights.write_audit_row(connection, identity, "user.create", "bob", "admin")
    (entry,) = rights.list_audit_rows(connection, limit=5)
    assert entry.time == pytest.approx(time.time(), abs=60)
    assert entry == AuditRow(
        entry.id, entry.time, "boss", "00ff", "192.0.2.7", "user.create", "bob", "admin"
    )


def test_entries_come_newest_first_in_pages(connection: Connection) -> None:
    for number in range(5):
        rights.write_audit_row(connection, ANONYMOUS, "act", str(number))
    first = list(rights.list_audit_rows(connection, limit=3))
    assert [e.target for e in first] == ["4", "3", "2"]
    rest = rights.list_audit_rows(connection, limit=3, before=first[-1].id)
    assert [e.target for e in rest] == ["1", "0"]


def test_long_texts_are_cut(connection: Connection) -> None:
    rights.write_audit_row(connection, ANONYMOUS, "act", "t" * 9999, "d" * 9999)
    (entry,) = rights.list_audit_rows(connection, limit=1)
    assert (len(entry.target), len(entry.detail)) == (rights.MAX_TARGET, rights.MAX_DETAIL)


def test_a_change_that_fails_leaves_no_record(served: RegistryHarness) -> None:
    def fail() -> None:
        with served.registry.database.write() as connection:
            rights.write_audit_row(connection, ANONYMOUS, "act", "target")
            raise RuntimeError("the change failed after all")

    with pytest.raises(RuntimeError, match="after all"):
        fail()
    with served.registry.database.read() as connection:
        assert list(rights.list_audit_rows(connection, limit=5)) == []
