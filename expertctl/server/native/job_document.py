"""What is told of a job (``schemas/job.schema.json``)."""

from msgspec import Raw, Struct

from expertctl.http.printable import printable
from expertctl.server.native.call import moment
from expertctl.server.native.job_store import Status, StoredJob


class JobError(Struct, frozen=True):
    """Why there is no answer, as the answer to a failed request says it."""

    code: str
    message: str
    hint: str


class JobDocument(Struct, frozen=True, kw_only=True):
    """A job as it is now; ``text`` is as much of the answer as is certain."""

    job_id: str
    status: Status
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    estimated_wait_ms: float | None
    """About how long until it begins; None once it has."""
    text: str
    result: Raw | None
    """The document of ``/v1/infer``, once there is one."""
    error: JobError | None


def document_of(job: StoredJob, *, expected_wait: float) -> JobDocument:
    """Return the document of a job; ``expected_wait`` is in seconds."""
    waits = job.status == "queued"
    return JobDocument(
        job_id=job.id,
        status=job.status,
        submitted_at=moment(job.submitted),
        started_at=None if job.started is None else moment(job.started),
        ended_at=None if job.ended is None else moment(job.ended),
        estimated_wait_ms=round(expected_wait * 1e3, 3) if waits else None,
        text=job.text,
        result=job.result,
        error=_error(job),
    )


def _error(job: StoredJob) -> JobError | None:
    error = job.error
    if error is None or job.status == "cancelled":
        return None
    return JobError(error.code, printable(error.message), printable(error.hint))
