"""`Outcome`: a result that is remembered, with all that a person should know of it."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from expertctl.engine.answer_form import Checked
from expertctl.engine.generate import Generated
from expertctl.engine.lent import Lent, told_of
from expertctl.engine.recording import figures_of, record
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import MemoryUse, RunResult
from expertctl.engine.trace import Trace
from expertctl.store.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer, what it was made with, and whether it has the form that was called for."""

    request: RunRequest
    lent: Lent
    generated: Generated
    form: Checked
    memory: MemoryUse
    trace: Trace | None = None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def remembered(
        self, catalogue: Catalogue, *, notes: Callable[[], tuple[str, ...]] = tuple
    ) -> RunResult:
        """Write it into the history and return it; ``notes`` are what else was not kept."""
        lent, generated = self.lent, self.generated
        prepared, timings_ms = lent.prepared, lent.clock.timings(generated)
        figures = figures_of(
            generated,
            kv_reused_tokens=lent.ready.reused,
            threads=lent.threads,
            bytes_read=lent.bytes_read,
        )
        unsaved = record(
            catalogue,
            prepared.planned,
            generated,
            job_id=self.job_id,
            form=self.form,
            prompt_tokens=len(prepared.prompt.ids),
            timings_ms=timings_ms,
            figures=figures,
        )
        return self.result(timings_ms, told=(*unsaved, *notes()))

    def result(self, timings_ms: Mapping[str, float], *, told: tuple[str, ...] = ()) -> RunResult:
        """Return it; ``told`` are warnings besides those of the answer itself."""
        lent, generated, prepared = self.lent, self.generated, self.lent.prepared
        return RunResult(
            job_id=self.job_id,
            planned=prepared.planned,
            dropped=prepared.dropped,
            generated=generated,
            validation_passed=self.form.passed,
            prompt_tokens=len(prepared.prompt.ids),
            timings_ms=timings_ms,
            memory=self.memory,
            experts_loaded=lent.loads,
            kv_reused_tokens=lent.ready.reused,
            numerics=prepared.numerics,
            threads=lent.threads,
            warnings=(*told_of(self.request, lent, generated, self.form), *told),
            bytes_read=lent.bytes_read,
            laps=lent.clock.laps,
            trace=self.trace,
            moe=lent.moe,
        )
