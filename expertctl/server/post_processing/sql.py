"""Answers that must be SQL: each statement is parsed, none is run.

No dialect is given, so it is enough if one dialect reads the whole answer. Only statements count:
the parser reads any words as an expression, even ``hello world``. A statement that the parser keeps
as raw text, without parsing it, neither passes nor fails. Prose around SQL is no fault.
"""

import logging

import sqlglot
from sqlglot import expressions
from sqlglot.errors import ParseError, SqlglotError

from expertctl.engine.answer_form import Checked, worst
from expertctl.engine.embedded_code import named_blocks, sql_in_prose, unnamed_blocks

MAX_CHARACTERS = 20_000
"""A longer answer is not checked: the parser is slow."""
_DIALECTS = ("", "postgres", "mysql", "tsql")
"""The default, which reads most, and dialects with quoting rules of their own."""
_TAGS = frozenset({"sql", "mysql", "postgresql", "postgres", "sqlite", "tsql"})
_STATEMENTS = (
    expressions.Query,
    expressions.DDL,
    expressions.DML,
    expressions.Alter,
    expressions.Analyze,
    expressions.Comment,
    expressions.Commit,
    expressions.Copy,
    expressions.Describe,
    expressions.Drop,
    expressions.Grant,
    expressions.Merge,
    expressions.Pragma,
    expressions.Rollback,
    expressions.Set,
    expressions.Show,
    expressions.Transaction,
    expressions.TruncateTable,
    expressions.Use,
    expressions.Values,
)
_NOT_SQL = "the answer is not SQL"

logging.getLogger("sqlglot").setLevel(logging.ERROR)  # its warnings contain the text


def check_sql(text: str) -> Checked:
    """Check that an answer, or each of its SQL code blocks, consists of SQL statements."""
    if not text.strip():
        return Checked(False, "the answer is empty")
    if len(text) > MAX_CHARACTERS:
        return Checked(None, f"the answer is not checked: over {MAX_CHARACTERS} characters")
    named = named_blocks(text, _TAGS)
    if named:
        return worst(map(_checked, named))
    within = sql_in_prose(text)
    first = _checked(text)
    others = map(_checked, filter(None, (*unnamed_blocks(text), within)))
    return first if first.passed else next((one for one in others if one.passed), first)


def _checked(text: str) -> Checked:
    """Return a pass if any dialect passes, else the verdict of the first dialect."""
    found = [_read(text, dialect) for dialect in _DIALECTS]
    return next((one for one in found if one.passed), None) or found[0]


def _read(text: str, dialect: str) -> Checked:
    try:
        statements = [one for one in sqlglot.parse(text, read=dialect) if one is not None]
    except SqlglotError as error:
        return Checked(False, f"{_NOT_SQL}: {_fault(error)}")
    except RecursionError:
        return Checked(None, "the answer is not checked: its SQL is nested too deep")
    if any(isinstance(one, expressions.Command) for one in statements):
        return Checked(None, "the answer is not checked: it has a statement that is not read")
    if not statements or not all(isinstance(one, _STATEMENTS) for one in statements):
        return Checked(False, f"{_NOT_SQL}: it is no statement")
    return Checked(True)


def _fault(error: SqlglotError) -> str:
    """Return what is wrong and where, without the excerpt that the parser adds in colours."""
    first = error.errors[0] if isinstance(error, ParseError) and error.errors else {}
    if not first:
        return "it cannot be split into words"
    fact = str(first["description"]).partition(" but got <")[0]
    return f"{fact[:200]}, line {first['line']}, column {first['col']}"
