"""`History`: the newest runs, how they were judged, and what that says of their experts.

It is part of ``index.db`` and never leaves the machine. It holds no prompt and no answer. The
evidence of a run outlives the run: what speaks for and against an expert is kept as sums that fade.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlite_utils import Database

from expertctl.digest import Digest
from expertctl.errors import DiskFullError, NotFoundError, StoreError, UsageError
from expertctl.store.file_mark import WhileUnchanged
from expertctl.store.index_database import IndexDatabase, advance, immediately
from expertctl.store.job import FAILED, Job, JobFigures, JobTimes, UsedExpert, Verdict
from expertctl.store.pair_gain import PairGain
from expertctl.store.success import Evidence, KeptEvidence, SuccessRates, evidence_of

KEPT_JOBS = 10_000
LAST = "last"
"""Names the newest run that answered."""
_SHOWN_JOBS = 3

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
_JOB_COLUMNS = (
    "job_id, at, task, base, finish_reason, validation, verdict, judged_at, prompt_tokens, "
    "generated_tokens, blamed, route_ms, load_ms, ttft_ms, decode_ms, total_ms"
)
_INSERT_JOB = f"INSERT INTO jobs ({_JOB_COLUMNS}) VALUES ({', '.join('?' * 16)})"  # noqa: S608  # constants
_FIGURES = tuple(JobFigures.__dataclass_fields__)
_INSERT_FIGURES = (
    f"INSERT INTO job_figures (number, {', '.join(_FIGURES)}) "  # noqa: S608  # constants
    f"VALUES (?{', ?' * len(_FIGURES)})"
)
_PARTS = ("jobs", "job_experts", "job_figures")
"""The tables that have rows of a run."""
_SUMS = "good, bad, well_formed, malformed, at"
_GET_OUTCOME = f"SELECT {_SUMS} FROM outcomes WHERE content_digest = ? AND task = ?"  # noqa: S608  # constants
_ALL_OUTCOMES = f"SELECT content_digest, task, {_SUMS} FROM outcomes"  # noqa: S608  # constants
_SET_OUTCOME = "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?)"
_SET_GAIN = "INSERT OR REPLACE INTO gains VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Usage:
    """How often an expert was used, and how often the user called it good or bad."""

    uses: int
    successes: int
    failures: int
    last_used: float | None
    """Seconds since the epoch."""


class History:
    """The owner of all tables of ``index.db`` except that of experts."""

    def __init__(self, database: IndexDatabase, *, clock: Callable[[], float] = time.time) -> None:
        """Remember the file; nothing is read yet."""
        self._database, self._clock = database, clock
        self._rates = WhileUnchanged(database.path, self._weighed)
        self._gains = WhileUnchanged(database.path, self._measured)

    def count_use(self, content_digest: Digest) -> bool:
        """Count one use without a run; return False where it cannot be written."""
        values = [str(content_digest), self._clock()]
        return self._noted(lambda db: db.execute(_COUNT_USE, values))

    def record(self, job: Job) -> bool:
        """Remember a run; return False where it cannot be written, which is never fatal."""
        return self._noted(lambda db: _insert(db, job))

    def judge(self, name: str, verdict: Verdict) -> Job:
        """Judge a run good or bad; return it. Only the last judgement of a run counts, once.

        ``name`` is its id, an unambiguous beginning of it, or `LAST`.

        Raises:
            NotFoundError: when no such run is remembered.
            UsageError: when several begin so.
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        judged: list[Job] = []
        if not self._database.path.exists():
            raise _unknown(name)

        def judge(db: Database) -> None:
            number, job = _found(db, name)
            now = replace(job, verdict=verdict, judged_at=self._clock())
            if job.verdict != verdict:
                _rejudge(db, number, job, now)
            judged.append(now if job.verdict != verdict else job)

        self._database.write(lambda db: _atomically(db, judge))
        return judged[-1]

    def jobs(self) -> list[Job]:
        """Return the runs that are remembered, the newest first."""
        found: list[Job] = []
        self._database.read("jobs", lambda db: found.extend(_jobs(db)))
        return found

    def usages(self) -> Mapping[Digest, Usage]:
        """Return how often each expert was used."""
        rows = self._database.rows("usage", "SELECT * FROM usage")
        return {Digest.parse(row.pop("content_digest")): Usage(**row) for row in rows}

    def success_rates(self) -> SuccessRates:
        """Return how well experts did of late; the last result is kept until a change."""
        return self._rates.get()

    def record_gain(self, gain: PairGain) -> None:
        """Remember what a chain of two experts gains; a later measurement replaces an earlier one.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """

        def record(db: Database) -> None:
            db.execute(_SET_GAIN, gain.to_row())
            advance(db)

        self._database.write(lambda db: _atomically(db, record))

    def pair_gains(self) -> Sequence[PairGain]:
        """Return all gains that were measured, sure or not, the newest first."""
        return self._gains.get()

    def gains(self, *, base: str | None = None) -> Mapping[tuple[Digest, Digest], float]:
        """Return the gains that are sure, by pair; of several bases the smallest counts."""
        found: dict[tuple[Digest, Digest], float] = {}
        for gain in self.pair_gains():
            if gain.is_sure and base in {None, gain.base}:
                found[gain.pair] = min(gain.gain, found.get(gain.pair, gain.gain))
        return found

    def clear(self) -> int:
        """Forget every run, use and judgement; return how many runs. Gains stay."""
        counts: list[int] = []

        def clear(db: Database) -> None:
            db.execute("PRAGMA secure_delete = ON")
            counts.append(db.execute("SELECT count(*) FROM jobs").fetchone()[0])
            for table in (*_PARTS, "outcomes", "usage"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608  # a constant
            advance(db)

        if self._database.path.exists():
            self._database.write(lambda db: _atomically(db, clear))
        return counts[-1] if counts else 0

    def _noted(self, action: Callable[[Database], object]) -> bool:
        try:
            self._database.jot(lambda db: _atomically(db, action))
        except (StoreError, DiskFullError) as error:
            self._database.notes.append(f"this use was not recorded: {error.message}")
            return False
        return True

    def _measured(self) -> Sequence[PairGain]:
        rows = self._database.rows("gains", "SELECT * FROM gains ORDER BY at DESC")
        return tuple(PairGain.from_row(row) for row in rows)

    def _weighed(self) -> SuccessRates:
        kept: dict[str, list[KeptEvidence]] = defaultdict(list)

        def read(db: Database) -> None:
            for digest, *evidence in db.execute(_ALL_OUTCOMES):
                kept[digest].append(tuple(evidence))

        self._database.read("outcomes", read)
        return SuccessRates(kept, now=self._clock())


def _atomically(db: Database, action: Callable[[Database], object]) -> None:
    with immediately(db):
        action(db)


def _insert(db: Database, job: Job) -> None:
    number = db.execute(_INSERT_JOB, _values(job)).lastrowid or 0
    for place, used in enumerate(job.experts):
        digest = str(used.content_digest)
        row = [number, place, digest, used.ref]
        db.execute("INSERT INTO job_experts VALUES (?, ?, ?, ?)", row)
        if job.finish_reason != FAILED:
            db.execute(_COUNT_USE, [digest, job.at])
    _weigh(db, job, at=job.at, join=Evidence.plus)
    if job.figures is not None:
        figures = [getattr(job.figures, name) for name in _FIGURES]
        db.execute(_INSERT_FIGURES, [number, *figures])
    for table in _PARTS:
        db.execute(f"DELETE FROM {table} WHERE number <= ?", [number - KEPT_JOBS])  # noqa: S608  # a constant
    if job.outcome == "bad" or job.finish_reason == FAILED:
        advance(db)


def _rejudge(db: Database, number: int, before: Job, now: Job) -> None:
    _weigh(db, before, at=now.evidence.at, join=Evidence.minus)
    _weigh(db, now, at=now.evidence.at, join=Evidence.plus)
    changes = [_verdicts(now, kind) - _verdicts(before, kind) for kind in ("good", "bad")]
    for used in now.experts:
        db.execute(_COUNT_VERDICT, [str(used.content_digest), *changes])
    query = "UPDATE jobs SET verdict = ?, judged_at = ? WHERE number = ?"
    db.execute(query, [now.verdict, now.judged_at, number])
    advance(db)


def _verdicts(job: Job, kind: str) -> int:
    return int(job.verdict == kind)


def _weigh(
    db: Database, job: Job, *, at: float, join: Callable[[Evidence, Evidence], Evidence]
) -> None:
    """Add the evidence of a run, or take it back, as far as it is still there."""
    if not (job.experts and job.evidence):
        return
    share = job.evidence.aged(at).share(len(job.experts))
    for used in job.experts:
        key = (str(used.content_digest), job.task)
        there = db.execute(_GET_OUTCOME, key).fetchone()
        known = evidence_of(there).aged(at) if there else Evidence(at=at)
        now = join(known, share)
        sums = [now.good, now.bad, now.well_formed, now.malformed, now.at]
        db.execute(_SET_OUTCOME, [*key, *sums])


def _found(db: Database, name: str) -> tuple[int, Job]:
    """Find one run by its id, the beginning of its id, or `LAST`."""
    if name == LAST:
        rows = _rows(db, "WHERE finish_reason != ? ORDER BY number DESC LIMIT 1", FAILED)
    else:
        rows = _rows(db, "WHERE job_id >= ? AND job_id < ? LIMIT ?", *_span(name), _SHOWN_JOBS + 1)
    if not rows:
        raise _unknown(name)
    if len(rows) > 1 and rows[0]["job_id"] != name:
        raise _ambiguous(name, [str(row["job_id"]) for row in rows])
    number = int(rows[0]["number"])
    return number, _job(rows[0], _experts(db, rows)[number], _figures(db, rows).get(number))


def _span(name: str) -> tuple[str, str]:
    """Return the range of ids that begin with ``name``; ids are hexadecimal."""
    lowered = name.lower()
    return (lowered, f"{lowered}g") if lowered.isalnum() else ("", "")


def _unknown(name: str) -> NotFoundError:
    if name == LAST:
        return NotFoundError("no run is remembered", hint="`expertctl run PROMPT` makes one")
    return NotFoundError(
        f"no run {name[:40]!r} is remembered; the newest {KEPT_JOBS} are",
        hint="`expertctl stats --json` shows the ids of the newest runs, `last` names the last",
    )


def _ambiguous(name: str, ids: Sequence[str]) -> UsageError:
    shown = ", ".join(job_id[: len(name) + 8] for job_id in ids[:_SHOWN_JOBS])
    more = " and more" if len(ids) > _SHOWN_JOBS else ""
    return UsageError(f"several runs begin with {name!r}: {shown}{more}", hint="write more of it")


def _jobs(db: Database) -> Iterator[Job]:
    rows = _rows(db, "ORDER BY number DESC")
    experts, figures = _experts(db, rows), _figures(db, rows)
    return (_job(row, experts[row["number"]], figures.get(row["number"])) for row in rows)


def _rows(db: Database, clause: str, *values: object) -> list[dict[str, Any]]:
    return list(db.query(f"SELECT number, {_JOB_COLUMNS} FROM jobs {clause}", values))  # noqa: S608  # constants


def _experts(db: Database, rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[UsedExpert, ...]]:
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


def _figures(db: Database, rows: Sequence[Mapping[str, Any]]) -> dict[int, JobFigures]:
    """Return the figures of runs that have any; a file of an older version has none."""
    if "job_figures" not in db.table_names():
        return {}
    numbers = [row["number"] for row in rows]
    query = f"SELECT number, {', '.join(_FIGURES)} FROM job_figures WHERE number BETWEEN ? AND ?"  # noqa: S608  # constants
    found = db.query(query, [min(numbers, default=0), max(numbers, default=0)])
    return {row.pop("number"): JobFigures(**row) for row in found}


def _values(job: Job) -> list[object]:
    times = job.times
    return [
        job.job_id,
        job.at,
        job.task,
        job.base,
        job.finish_reason,
        job.validation,
        job.verdict,
        job.judged_at,
        job.prompt_tokens,
        job.generated_tokens,
        int(job.blamed),
        times.route,
        times.load,
        times.ttft,
        times.decode,
        times.total,
    ]


def _job(
    row: Mapping[str, Any], experts: tuple[UsedExpert, ...], figures: JobFigures | None
) -> Job:
    times = JobTimes(**{name: row[f"{name}_ms"] for name in JobTimes.__dataclass_fields__})
    plain = ("job_id", "at", "task", "base", "finish_reason", "validation", "verdict", "judged_at")
    return Job(
        **{name: row[name] for name in (*plain, "prompt_tokens", "generated_tokens")},
        blamed=bool(row["blamed"]),
        experts=experts,
        times=times,
        figures=figures,
    )
