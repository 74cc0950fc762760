"""The tables of ``index.db``: installed experts in `Catalogue`, past runs in `RunHistory`.

The history is private: it never leaves the machine and holds no prompt and no answer. The evidence
of a run outlives the run: what speaks for and against an expert is stored as sums that decay.

The file may be deleted at any time: `Catalogue.rebuild` fills the table of experts again from the
store, and the history starts anew. A damaged file is moved aside, and `notes` says so. Where
nothing can be written, reading still works and uses are not recorded.
"""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertctl.digest import Digest
from expertctl.errors import DiskFullError, NotFoundError, StoreError, UsageError
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import FileCachedValue
from expertctl.store.index_database import (
    IndexDatabase,
    advance_revision,
    immediate_transaction,
    list_tables,
    query_dicts,
)
from expertctl.store.refs import StoredExpert
from expertctl.store.run_record import (
    FINISH_ERROR,
    PairGain,
    RunEvidence,
    RunFigures,
    RunRecord,
    RunTimes,
    StoredEvidence,
    SuccessRates,
    UsedExpert,
    UserVerdict,
    parse_evidence,
)

if TYPE_CHECKING:
    from sqlite_utils.db import Table

MAX_RUNS = 10_000
LAST = "last"
"""The name of the newest run that answered."""
_MAX_NAMED_RUNS = 3

_COUNT_USE = """
INSERT INTO usage (content_digest, uses, successes, failures, last_used) VALUES (?, 1, 0, 0, ?)
ON CONFLICT (content_digest) DO UPDATE SET uses = uses + 1,
last_used = max(coalesce(last_used, 0), ?2)
"""
_COUNT_VERDICT = """
INSERT INTO usage (content_digest, uses, successes, failures, last_used)
VALUES (?, 0, max(0, ?2), max(0, ?3), NULL)
ON CONFLICT (content_digest) DO UPDATE SET successes = max(0, successes + ?2),
failures = max(0, failures + ?3)
"""
_PLAIN_FIELDS = (
    "job_id", "at", "task", "base", "finish_reason", "validation", "verdict", "judged_at",
    "prompt_tokens", "generated_tokens",
)  # fmt: skip
"""The fields of a `RunRecord` that are stored as they are, under their own names."""
_JOB_COLUMNS = (
    f"{', '.join(_PLAIN_FIELDS)}, blamed, route_ms, load_ms, ttft_ms, decode_ms, total_ms"
)
_INSERT_JOB = f"INSERT INTO jobs ({_JOB_COLUMNS}) VALUES ({', '.join('?' * 16)})"  # noqa: S608  # constants
_FIGURES = tuple(RunFigures.__dataclass_fields__)
_INSERT_FIGURES = (
    f"INSERT INTO job_figures (number, {', '.join(_FIGURES)}) "  # noqa: S608  # constants
    f"VALUES (?{', ?' * len(_FIGURES)})"
)
_PARTS = ("jobs", "job_experts", "job_figures")
"""The tables that have rows for a run."""
_SUMS = "good, bad, well_formed, malformed, at"
_GET_OUTCOME = f"SELECT {_SUMS} FROM outcomes WHERE content_digest = ? AND task = ?"  # noqa: S608  # constants
_ALL_OUTCOMES = f"SELECT content_digest, task, {_SUMS} FROM outcomes"  # noqa: S608  # constants
_SET_OUTCOME = "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?)"
_SET_GAIN = "INSERT OR REPLACE INTO gains VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class UsageCount:
    """How often an expert was used, and how often the user rated it good or bad."""

    uses: int
    successes: int
    failures: int
    last_used: float | None
    """Seconds since the epoch."""


class RunHistory:
    """The owner of all tables of ``index.db`` except that of experts; raises as `IndexDatabase`."""

    def __init__(self, database: IndexDatabase, *, clock: Callable[[], float] = time.time) -> None:
        """Remember the file; nothing is read yet."""
        self._database, self._clock = database, clock
        self._rates = FileCachedValue(database.path, self._read_rates)
        self._gains = FileCachedValue(database.path, self._read_gains)

    def record_run(self, job: RunRecord) -> bool:
        """Store a run; return False where it cannot be written, which is never fatal."""
        try:
            self._database.write_relaxed(
                lambda db: _run_atomically(db, lambda db: _insert_run(db, job))
            )
        except (StoreError, DiskFullError) as error:
            self._database.notes.append(f"this use was not recorded: {error.message}")
            return False
        return True

    def rate_run(self, name: str, verdict: UserVerdict) -> RunRecord:
        """Rate a run good or bad and return it; the last rating of a run counts, once.

        ``name`` is its id, an unambiguous prefix of it, or `LAST`.

        Raises:
            NotFoundError: when no such run is stored.
            UsageError: when several ids have that prefix.
        """
        judged: list[RunRecord] = []
        if not self._database.path.exists():
            raise _unknown_run_error(name)

        def judge(db: sqlite3.Connection) -> None:
            number, job = _find_run(db, name)
            now = replace(job, verdict=verdict, judged_at=self._clock())
            if job.verdict != verdict:
                _change_verdict(db, number, job, now)
            judged.append(now if job.verdict != verdict else job)

        self._database.write(lambda db: _run_atomically(db, judge))
        return judged[-1]

    def list_runs(self) -> list[RunRecord]:
        """Return the stored runs, the newest first."""
        found: list[RunRecord] = []
        self._database.read("jobs", lambda db: found.extend(_iter_runs(db)))
        return found

    def read_usage_counts(self) -> Mapping[Digest, UsageCount]:
        """Return how often each expert was used."""
        rows = self._database.query_rows("usage", "SELECT * FROM usage")
        return {Digest.parse(row.pop("content_digest")): UsageCount(**row) for row in rows}

    def read_success_rates(self) -> SuccessRates:
        """Return the recent success rates of experts; cached until the file changes."""
        return self._rates.get()

    def record_gain(self, gain: PairGain) -> None:
        """Store the gain of a chain of two experts; a later measurement replaces an earlier one."""

        def record(db: sqlite3.Connection) -> None:
            db.execute(_SET_GAIN, gain.to_row())
            advance_revision(db)

        self._database.write(lambda db: _run_atomically(db, record))

    def list_gains(self) -> Sequence[PairGain]:
        """Return all measured gains, significant or not, the newest first."""
        return self._gains.get()

    def find_sure_gains(self, *, base: str | None = None) -> Mapping[tuple[Digest, Digest], float]:
        """Return the significant gains by pair; of several bases the smallest counts."""
        found: dict[tuple[Digest, Digest], float] = {}
        for gain in self.list_gains():
            if gain.is_significant and base in {None, gain.base}:
                found[gain.pair] = min(gain.gain, found.get(gain.pair, gain.gain))
        return found

    def clear(self) -> int:
        """Delete every run, use and rating; return the number of runs. Gains stay."""
        counts: list[int] = []

        def clear(db: sqlite3.Connection) -> None:
            db.execute("PRAGMA secure_delete = ON")
            counts.append(db.execute("SELECT count(*) FROM jobs").fetchone()[0])
            for table in (*_PARTS, "outcomes", "usage"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608  # a constant
            advance_revision(db)

        if self._database.path.exists():
            self._database.write(lambda db: _run_atomically(db, clear))
        return counts[-1] if counts else 0

    def _read_gains(self) -> Sequence[PairGain]:
        rows = self._database.query_rows("gains", "SELECT * FROM gains ORDER BY at DESC")
        return tuple(PairGain.from_row(row) for row in rows)

    def _read_rates(self) -> SuccessRates:
        kept: dict[str, list[StoredEvidence]] = defaultdict(list)

        def read(db: sqlite3.Connection) -> None:
            for digest, *evidence in db.execute(_ALL_OUTCOMES):
                kept[digest].append(tuple(evidence))

        self._database.read("outcomes", read)
        return SuccessRates(kept, now=self._clock())


def _run_atomically(db: sqlite3.Connection, action: Callable[[sqlite3.Connection], object]) -> None:
    with immediate_transaction(db):
        action(db)


def _insert_run(db: sqlite3.Connection, job: RunRecord) -> None:
    number = db.execute(_INSERT_JOB, _run_values(job)).lastrowid or 0
    for place, used in enumerate(job.experts):
        digest = str(used.content_digest)
        row = [number, place, digest, used.ref]
        db.execute("INSERT INTO job_experts VALUES (?, ?, ?, ?)", row)
        if job.finish_reason != FINISH_ERROR:
            db.execute(_COUNT_USE, [digest, job.at])
    _apply_evidence(db, job, at=job.at, join=RunEvidence.add)
    if job.figures is not None:
        figures = [getattr(job.figures, name) for name in _FIGURES]
        db.execute(_INSERT_FIGURES, [number, *figures])
    for table in _PARTS:
        db.execute(f"DELETE FROM {table} WHERE number <= ?", [number - MAX_RUNS])  # noqa: S608  # a constant
    if job.outcome == "bad" or job.finish_reason == FINISH_ERROR:
        advance_revision(db)


def _change_verdict(db: sqlite3.Connection, number: int, before: RunRecord, now: RunRecord) -> None:
    _apply_evidence(db, before, at=now.evidence.at, join=RunEvidence.subtract)
    _apply_evidence(db, now, at=now.evidence.at, join=RunEvidence.add)
    changes = [_verdict_count(now, kind) - _verdict_count(before, kind) for kind in ("good", "bad")]
    for used in now.experts:
        db.execute(_COUNT_VERDICT, [str(used.content_digest), *changes])
    query = "UPDATE jobs SET verdict = ?, judged_at = ? WHERE number = ?"
    db.execute(query, [now.verdict, now.judged_at, number])
    advance_revision(db)


def _verdict_count(job: RunRecord, kind: str) -> int:
    return int(job.verdict == kind)


def _apply_evidence(
    db: sqlite3.Connection,
    job: RunRecord,
    *,
    at: float,
    join: Callable[[RunEvidence, RunEvidence], RunEvidence],
) -> None:
    """Add the evidence of a run to its experts' sums, or subtract what is left of it."""
    if not (job.experts and job.evidence):
        return
    share = job.evidence.decay_to(at).divide(len(job.experts))
    for used in job.experts:
        key = (str(used.content_digest), job.task)
        there = db.execute(_GET_OUTCOME, key).fetchone()
        known = parse_evidence(there).decay_to(at) if there else RunEvidence(at=at)
        now = join(known, share)
        sums = [now.good, now.bad, now.well_formed, now.malformed, now.at]
        db.execute(_SET_OUTCOME, [*key, *sums])


def _find_run(db: sqlite3.Connection, name: str) -> tuple[int, RunRecord]:
    """Find one run by its id, a prefix of its id, or `LAST`."""
    if name == LAST:
        rows = _query_rows(
            db, "WHERE finish_reason != ? ORDER BY number DESC LIMIT 1", FINISH_ERROR
        )
    else:
        rows = _query_rows(
            db, "WHERE job_id >= ? AND job_id < ? LIMIT ?", *_id_range(name), _MAX_NAMED_RUNS + 1
        )
    if not rows:
        raise _unknown_run_error(name)
    if len(rows) > 1 and rows[0]["job_id"] != name:
        raise _ambiguous_run_error(name, [str(row["job_id"]) for row in rows])
    number = int(rows[0]["number"])
    return number, _make_run(
        rows[0], _query_experts(db, rows)[number], _query_figures(db, rows).get(number)
    )


def _id_range(name: str) -> tuple[str, str]:
    """Return the range of ids that begin with ``name``; ids are hexadecimal."""
    lowered = name.lower()
    return (lowered, f"{lowered}g") if lowered.isalnum() else ("", "")


def _unknown_run_error(name: str) -> NotFoundError:
    if name == LAST:
        return NotFoundError("no run is remembered", hint="`expertctl run PROMPT` makes one")
    return NotFoundError(
        f"no run {name[:40]!r} is remembered; the newest {MAX_RUNS} are",
        hint="`expertctl stats --json` shows the ids of the newest runs, `last` names the last",
    )


def _ambiguous_run_error(name: str, ids: Sequence[str]) -> UsageError:
    shown = ", ".join(job_id[: len(name) + 8] for job_id in ids[:_MAX_NAMED_RUNS])
    more = " and more" if len(ids) > _MAX_NAMED_RUNS else ""
    return UsageError(f"several runs begin with {name!r}: {shown}{more}", hint="write more of it")


def _iter_runs(db: sqlite3.Connection) -> Iterator[RunRecord]:
    rows = _query_rows(db, "ORDER BY number DESC")
    experts, figures = _query_experts(db, rows), _query_figures(db, rows)
    return (_make_run(row, experts[row["number"]], figures.get(row["number"])) for row in rows)


def _query_rows(db: sqlite3.Connection, clause: str, *values: object) -> list[dict[str, Any]]:
    return list(query_dicts(db, f"SELECT number, {_JOB_COLUMNS} FROM jobs {clause}", values))  # noqa: S608  # constants


def _query_experts(
    db: sqlite3.Connection, rows: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[UsedExpert, ...]]:
    numbers = [row["number"] for row in rows]
    found: dict[int, list[UsedExpert]] = {number: [] for number in numbers}
    span = (min(numbers, default=0), max(numbers, default=0))
    query = (
        "SELECT number, ref, content_digest FROM job_experts WHERE number BETWEEN ? AND ? "
        "ORDER BY number, place"
    )
    for number, ref, digest in db.execute(query, span):
        if number in found:
            found[number].append(UsedExpert(ref, Digest.parse(digest)))
    return {number: tuple(each) for number, each in found.items()}


def _query_figures(
    db: sqlite3.Connection, rows: Sequence[Mapping[str, Any]]
) -> dict[int, RunFigures]:
    """Return the figures of runs that have any; a file of an older version has none."""
    if "job_figures" not in list_tables(db):
        return {}
    numbers = [row["number"] for row in rows]
    query = f"SELECT number, {', '.join(_FIGURES)} FROM job_figures WHERE number BETWEEN ? AND ?"  # noqa: S608  # constants
    found = query_dicts(db, query, [min(numbers, default=0), max(numbers, default=0)])
    return {row.pop("number"): RunFigures(**row) for row in found}


def _run_values(job: RunRecord) -> list[object]:
    """Return the values of `_JOB_COLUMNS`."""
    times = [getattr(job.times, name) for name in RunTimes.__dataclass_fields__]
    return [*(getattr(job, name) for name in _PLAIN_FIELDS), int(job.blamed), *times]


def _make_run(
    row: Mapping[str, Any], experts: tuple[UsedExpert, ...], figures: RunFigures | None
) -> RunRecord:
    times = RunTimes(**{name: row[f"{name}_ms"] for name in RunTimes.__dataclass_fields__})
    return RunRecord(
        **{name: row[name] for name in _PLAIN_FIELDS},
        blamed=bool(row["blamed"]),
        experts=experts,
        times=times,
        figures=figures,
    )


def _open_experts(db: sqlite3.Connection) -> "Table":
    """Return the table of experts; sqlite_utils is imported only to change it."""
    from sqlite_utils import Database

    return Database(db, execute_plugins=False).table("experts")


class Catalogue:
    """The owner of the table of experts; `history` owns the rest of the file.

    Methods raise as those of `IndexDatabase`.
    """

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is read yet."""
        self.path = path
        self.database = IndexDatabase(path)
        self.history = RunHistory(self.database)

    @property
    def notes(self) -> list[str]:
        """Messages about the file for the user; grows."""
        return self.database.notes

    def add_all(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Store several experts in one write."""
        rows = [_expert_row(expert, manifest) for expert, manifest in experts]
        self._write(lambda db: _open_experts(db).upsert_all(rows, pk="ref"))

    def remove(self, expert: StoredExpert) -> None:
        """Remove an expert; its history stays in case it is installed again."""
        self._write(lambda db: _open_experts(db).delete_where("ref = ?", [expert.ref]))

    def rebuild(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Replace all experts; the history stays."""
        rows = [_expert_row(expert, manifest) for expert, manifest in experts]

        def replace(db: sqlite3.Connection) -> None:
            _open_experts(db).delete_where()
            _open_experts(db).insert_all(rows, pk="ref")

        self._write(replace)

    def list_refs(self) -> list[str]:
        """Return the refs of all stored experts, sorted."""
        rows = self.database.query_rows("experts", "SELECT ref FROM experts")
        return sorted(str(row["ref"]) for row in rows)

    def read_revision(self) -> int:
        """Return a number that changes with everything here that a routing decision may depend on.

        That is: experts added or removed, ratings, failed runs and gains, by any process. It costs
        a few microseconds where nothing was written since the last call.
        """
        return self.database.read_revision()

    def read_success_rates(self) -> SuccessRates:
        """Return the current success rates; looking one up does not read the file again."""
        return self.history.read_success_rates()

    def find_sure_gains(self, *, base: str | None = None) -> Mapping[tuple[Digest, Digest], float]:
        """Return the significant gains of chains of two experts over the better one of the two.

        A pair is (first, second) of the chain. With ``base`` only gains measured on it count.
        """
        return self.history.find_sure_gains(base=base)

    def find_problems(self) -> list[str]:
        """Return the faults of the file, without changing it."""
        return self.database.find_problems()

    def check_integrity(self) -> None:
        """Raise unless the file is whole and has our tables."""
        assert self.find_problems() == []

    def _write(self, action: Callable[[sqlite3.Connection], object]) -> None:
        def change(db: sqlite3.Connection) -> None:
            with immediate_transaction(db):
                action(db)
                advance_revision(db)

        self.database.write(change)


def _expert_row(expert: StoredExpert, manifest: Manifest) -> dict[str, object]:
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "name": str(expert.package),
        "version": str(expert.version),
        "description": manifest.description,
        "task": manifest.routing.task,
        "base": expert.base.name,
        "signer": expert.signer,
        "size": expert.size,
    }
