import time

import pytest
from sqlalchemy import Connection

from registry_server.access import audit
from registry_server.access.audit import Entry
from registry_server.access.identity import ANONYMOUS, Identity
from tests.registry_server.served import Served


def test_a_record_says_who_from_where_what_and_when(connection: Connection) -> None:
    identity = Identity(1, "boss", True, "00ff", address="192.0.2.7")
    audit.record(connection, identity, "user.create", "bob", "admin")
    (entry,) = audit.entries(connection, limit=5)
    assert entry.time == pytest.approx(time.time(), abs=60)
    assert entry == Entry(
        entry.id, entry.time, "boss", "00ff", "192.0.2.7", "user.create", "bob", "admin"
    )


def test_entries_come_newest_first_in_pages(connection: Connection) -> None:
    for number in range(5):
        audit.record(connection, ANONYMOUS, "act", str(number))
    first = list(audit.entries(connection, limit=3))
    assert [e.target for e in first] == ["4", "3", "2"]
    rest = audit.entries(connection, limit=3, before=first[-1].id)
    assert [e.target for e in rest] == ["1", "0"]


def test_long_texts_are_cut(connection: Connection) -> None:
    audit.record(connection, ANONYMOUS, "act", "t" * 9999, "d" * 9999)
    (entry,) = audit.entries(connection, limit=1)
    assert (len(entry.target), len(entry.detail)) == (audit.MAX_TARGET, audit.MAX_DETAIL)


def test_a_change_that_fails_leaves_no_record(served: Served) -> None:
    def fail() -> None:
        with served.registry.database.write() as connection:
            audit.record(connection, ANONYMOUS, "act", "target")
            raise RuntimeError("the change failed after all")

    with pytest.raises(RuntimeError, match="after all"):
        fail()
    with served.registry.database.read() as connection:
        assert list(audit.entries(connection, limit=5)) == []
