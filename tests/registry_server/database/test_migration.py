import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine

from expertctl.errors import StoreError
from registry_server.database.connection import MIGRATIONS, Database, migrate
from registry_server.database.tables import HEAD, METADATA, current_revision


def list_schema_differences(connection: Connection) -> list[object]:
    """The differences between the tables of a database and those of this version."""
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, METADATA))


def test_the_steps_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "registry.db")
    with database.read() as connection:
        assert list_schema_differences(connection) == []
        assert (
            current_revision(connection)
            == HEAD
            == ScriptDirectory(str(MIGRATIONS)).get_current_head()
        )
    database.close()


def test_a_server_whose_tables_are_up_to_date_does_not_load_what_changes_them(
    tmp_path: Path,
) -> None:
    Database.open(tmp_path / "registry.db").close()
    program = (
        "import sys, pathlib\n"
        "from registry_server.database.connection import Database\n"
        "Database.open(pathlib.Path(sys.argv[1])).close()\n"
        "print('alembic' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "registry.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_database_that_is_up_to_date_is_left_as_it_is(tmp_path: Path) -> None:
    Database.open(tmp_path / "registry.db").close()
    before = (tmp_path / "registry.db").read_bytes()
    Database.open(tmp_path / "registry.db").close()
    assert (tmp_path / "registry.db").read_bytes() == before


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "registry.db")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(StoreError, match="from another version") as caught:
        Database.open(tmp_path / "registry.db")
    assert "newer" in caught.value.hint


def test_a_folder_with_a_percent_sign_is_no_matter(tmp_path: Path) -> None:
    folder = tmp_path / "50%(here)s"
    folder.mkdir()
    Database.open(folder / "registry.db").close()
    database = Database.open(folder / "registry.db")
    with database.read() as connection:
        assert list_schema_differences(connection) == []
    database.close()
    assert sorted(path.name for path in folder.iterdir()) == ["registry.db"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["50%(here)s"]


def test_what_namespaces_used_before_it_was_counted_is_counted(tmp_path: Path) -> None:
    with create_engine(f"sqlite:///{tmp_path / 'registry.db'}").begin() as connection:
        migrate(connection, revision="0001")
        for statement in (
            "INSERT INTO namespaces VALUES (1, 'acme', 'acme', 'oci', 'token', NULL, 0)",
            "INSERT INTO namespaces VALUES (2, 'empty', 'empty', 'oci', 'token', NULL, 0)",
            "INSERT INTO repositories VALUES (1, 1, 'acme/a', 0), (2, 1, 'acme/b', 0)",
            "INSERT INTO blobs VALUES ('sha256:a', 10, 0), ('sha256:b', 100, 0)",
            "INSERT INTO repository_blobs VALUES (1, 'sha256:a', 0), (2, 'sha256:a', 0)",
            "INSERT INTO uploads VALUES ('u', 1, NULL, 7, 0, 0)",
        ):
            connection.exec_driver_sql(statement)
    database = Database.open(tmp_path / "registry.db")
    with database.read() as connection:
        used = connection.exec_driver_sql("SELECT name, used FROM namespaces ORDER BY id").all()
    database.close()
    assert [tuple(row) for row in used] == [("acme", 17), ("empty", 0)]


def test_index_documents_signed_before_that_was_recorded_are_as_old_as_their_change(
    tmp_path: Path,
) -> None:
    with create_engine(f"sqlite:///{tmp_path / 'registry.db'}").begin() as connection:
        migrate(connection, revision="0002")
        columns = "namespace_id, name, skeleton, description, revision, index_document"
        for statement in (
            "INSERT INTO namespaces VALUES (1, 'acme', 'acme', 'expert', 'token', NULL, 0, 0)",
            f"INSERT INTO packages ({columns}, created, updated) "
            "VALUES (1, 'sql', 'sql', '', 3, x'00', 1.5, 2.5)",
        ):
            connection.exec_driver_sql(statement)
    database = Database.open(tmp_path / "registry.db")
    with database.read() as connection:
        row = connection.exec_driver_sql("SELECT signed, updated FROM packages").one()
        assert list_schema_differences(connection) == []
    database.close()
    assert tuple(row) == (2.5, 2.5)


def test_packages_can_be_browsed_that_were_published_before_that(tmp_path: Path) -> None:
    manifest = '{"base": {"name": "org/base, v2"}, "adapters": [%s]}'
    adapters = ", ".join(f'{{"kind": "{kind}"}}' for kind in ("lora", "dora", "lora"))
    with create_engine(f"sqlite:///{tmp_path / 'registry.db'}").begin() as connection:
        migrate(connection, revision="0003")
        columns = "namespace_id, name, skeleton, description, revision, index_document"
        connection.exec_driver_sql(
            "INSERT INTO namespaces VALUES (1, 'acme', 'acme', 'expert', 'token', NULL, 0, 0)"
        )
        for name, latest in (("sql", "'1.0.0'"), ("yanked", "NULL")):
            connection.exec_driver_sql(
                f"INSERT INTO packages ({columns}, created, updated, latest) "
                f"VALUES (1, '{name}', '{name}', '', 3, x'00', 1.5, 2.5, {latest})"
            )
        release = "package_id, version, content_digest, manifest, size, published, downloads"
        connection.exec_driver_sql(
            f"INSERT INTO releases ({release}) VALUES (1, '1.0.0', '', ?, 0, 0, 0)",
            ((manifest % adapters).encode(),),
        )
    database = Database.open(tmp_path / "registry.db")
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT base, kinds FROM packages ORDER BY id").all()
        assert list_schema_differences(connection) == []
    database.close()
    assert [tuple(row) for row in rows] == [("org/base, v2", " lora dora "), ("", "")]
