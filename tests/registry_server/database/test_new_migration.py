"""The script with which a developer changes the tables."""

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, inspect

from registry_server.database.connection import migrate
from registry_server.database.tables import HEAD, METADATA
from scripts.new_migration import main, make_step


def changed() -> MetaData:
    """Tables with one more of them, and one more column."""
    metadata = MetaData(naming_convention=METADATA.naming_convention)
    for table in METADATA.sorted_tables:
        table.to_metadata(metadata)
    metadata.tables["tags"].append_column(Column("pulls", Integer, server_default="0"))
    Table("mirrors", metadata, Column("id", Integer, primary_key=True))
    return metadata


def test_tables_that_did_not_change_need_no_step() -> None:
    assert make_step("nothing", METADATA) is None


def test_a_step_makes_what_is_new() -> None:
    text = make_step("add_mirrors", changed())
    assert text is not None
    assert f'down_revision = "{HEAD}"' in text
    assert '"""Add mirrors."""' in text
    with create_engine("sqlite://").begin() as connection:
        migrate(connection)
        names: dict[str, object] = {}
        exec(compile(text, "step", "exec"), names)  # what the script wrote, as alembic would
        upgrade = names["upgrade"]
        assert callable(upgrade)
        with Operations.context(MigrationContext.configure(connection)):
            upgrade()
        found = inspect(connection)
        assert "mirrors" in found.get_table_names()
        assert "pulls" in {column["name"] for column in found.get_columns("tags")}


@pytest.mark.parametrize("words", [[], ["a", "b"], ["../evil"], ["Add"], [""]])
def test_a_step_has_one_plain_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "give one name" in capsys.readouterr().err


def test_nothing_is_written_when_nothing_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add_nothing"]) == 1
    assert "already" in capsys.readouterr().err
