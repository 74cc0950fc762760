"""SQL that answers are: read by one dialect, never run."""

import logging
import sqlite3

import pytest

from expertctl.server.response_format import MAX_CHARACTERS, check_sql

ANY_SQL = [
    "SELECT 1",
    "SELECT a, COUNT(*) FROM t WHERE b > 3 GROUP BY a HAVING COUNT(*) > 1 ORDER BY 2 DESC LIMIT 5",
    "WITH a AS (SELECT 1 AS x) SELECT * FROM a LEFT JOIN b ON a.x = b.x",
    "INSERT INTO t (a, b) VALUES (1, 'x'), (2, 'it''s');",
    "UPDATE t SET a = a + 1 WHERE b IN (SELECT b FROM u)",
    "DELETE FROM t WHERE a IS NULL; DROP TABLE IF EXISTS u",
    "CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT NOT NULL DEFAULT '')",
    "BEGIN; ALTER TABLE t ADD COLUMN c TEXT; COMMIT;",
    "VALUES (1, 2)",
    "SELECT 1 UNION ALL SELECT 2 -- both",
    "SELECT SUM(a) OVER (PARTITION BY b ORDER BY c) FROM t",
    "SELECT CASE WHEN a THEN 1 ELSE 2 END FROM t",
]
DIALECTS = [
    "SELECT `a` FROM `t` LIMIT 5, 10",
    "SELECT TOP 5 [a b] FROM [t]",
    "SELECT a::int, NOW() - INTERVAL '1 day' FROM t",
    "CREATE FUNCTION f() RETURNS int AS $$ SELECT 1 $$ LANGUAGE sql",
    "SHOW TABLES",
]
NO_SQL = [
    "SELEC a FROM t",
    "SELECT FROM WHERE",
    "SELECT * FROM t WHERE",
    "INSERT INTO t VALUES (1, 2",
    "SELECT a b c FROM t",
    "SELECT 'a",
    "DELETE FROM t; and then some words",
]


@pytest.mark.parametrize("text", [*ANY_SQL, *DIALECTS])
def test_sql_is_read(text: str) -> None:
    assert check_sql(text).passed is True
    assert check_sql(f"Here it is:\n```sql\n{text}\n```\nDone.").passed is True


@pytest.mark.parametrize("text", [*NO_SQL, "hello world", "hello", "1 + 1", "-- nothing", ""])
def test_what_is_no_sql_is_told_on_one_plain_line(text: str) -> None:
    found = check_sql(text)
    assert found.passed is False
    assert found.problem.isprintable()
    assert len(found.problem) < 300


@pytest.mark.parametrize("text", [*ANY_SQL, *NO_SQL])
def test_it_is_sql_where_a_database_says_so(text: str) -> None:
    """SQLite complains of missing tables only when it has understood the statement."""
    database = sqlite3.connect(":memory:")
    problems = list[str]()
    for statement in text.split(";"):
        try:
            database.execute(statement)
        except sqlite3.Error as error:
            problems.append(str(error))
    understood = all("no such" in problem for problem in problems)
    assert check_sql(text).passed is understood


def test_one_block_that_is_no_sql_is_enough() -> None:
    assert check_sql("```sql\nSELECT 1\n```\n```sql\nSELEC 2 FROM t\n```").passed is False
    assert check_sql("```sql\nSELECT 1\n```\n```python\nprint()\n```").passed is True


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1 -- " + "x" * MAX_CHARACTERS,
        "SELECT " + "(" * 500 + "1" + ")" * 500,
        "SELECT 1; CALL me_maybe AGAIN AND AGAIN",
    ],
    ids=["too long", "nested too deep", "a statement that is not read"],
)
def test_what_cannot_be_decided_is_left_open(text: str) -> None:
    found = check_sql(text)
    assert found.passed is None
    assert found.problem.startswith("the answer is not checked: ")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "a," * 9000 + "a FROM WHERE",
        "SELECT " + "CASE WHEN " * 1900,
        "SELECT (" * 2400,
        "'" * 19_999,
    ],
    ids=["columns", "cases", "brackets", "quotes"],
)
def test_hostile_text_never_passes(text: str) -> None:
    assert check_sql(text).passed is not True


def test_the_parser_writes_nothing_of_the_text_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        check_sql("EXPLAIN the secret word")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("Here is the query:\n\nSELECT a\nFROM t;\n\nIt lists all values of a.", True),
        ("Use this:\nSELECT a FROM t", True),
        ("1. First:\n   ```sql\n   SELECT 1\n   ```\n2. Done.", True),
        ("```\nSELECT 1\n```\nprints\n```\none\n```", True),
        ("~~~SQL\nSELECT 1\n~~~", True),
        ("Here is the query:\n\nSELEC a\nFROM t;\n\nIt lists all values of a.", False),
        ("Here is the query:\n\nSELECT a FROM\n\nIt lists all values of a.", False),
    ],
)
def test_prose_around_sql_is_no_fault(text: str, passed: bool) -> None:
    assert check_sql(text).passed is passed
