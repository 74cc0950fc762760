"""Compiles the kernels of a base before anybody waits for an answer: a few tokens are generated.

Kernels are kept below ``EXPERT_HOME`` for all later processes (docs/adr/0013). They are compiled
for a base alone, and for each set of adapter kinds that is installed for it; those of a run first,
then those of the batch engine, which a server uses.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from expertctl.digest import Progress, no_progress
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.errors import BudgetError
from expertctl.routing.candidate import Installed, misfit
from expertctl.routing.planner import Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.catalogue import Catalogue
from expertctl.telling import WARNING, Tell, tell_nobody

_PROMPT = "Sort these numbers in ascending order, then say which one is the largest: 41, 17, 23, 15"
_TOKENS = 3


def compile_ahead(
    planner: Planner,
    base: StoredBase,
    like: RouteRequest,
    *,
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> bool:
    """Run and serve a base with the numeric settings of a request; return whether kernels run it.

    It is not remembered as a use of anything.

    Raises:
        ExpertError: as a run does.
    """
    with tempfile.TemporaryDirectory() as folder:
        unseen = replace(planner, catalogue=Catalogue(Path(folder) / "index.db"))
        engine = Engine(unseen, budget=budget, progress=progress, tell=tell)
        try:
            result = _run(engine, base, like, ())
            if result.numerics.backend != "packed":
                return False
            for expert in _of_each_kind(planner, base):
                _run(engine, base, like, (Forced(expert.digest),))
        finally:
            engine.close()
        _serve(unseen, base, like, budget=budget, tell=tell)
    return True


def _serve(
    planner: Planner, base: StoredBase, like: RouteRequest, *, budget: int | None, tell: Tell
) -> None:
    """Start the batch engine as a server does, which compiles its kernels, and end it.

    Its news are those of a server and not told here; its warnings are.
    """
    settings = BatchSettings(
        base=base.name,
        budget=budget,
        dtype=like.dtype,
        adapter_dtype=like.adapter_dtype,
        deterministic=like.deterministic,
    )

    def tell_warnings(text: str) -> None:
        if text.startswith(WARNING):
            tell(text)

    engine = BatchEngine(planner, settings, tell=tell_warnings)
    try:
        engine.start()
    except BudgetError as error:
        tell(f"{WARNING}the kernels of `serve` were not compiled: {error.message}")
    finally:
        engine.close()


def _of_each_kind(planner: Planner, base: StoredBase) -> Iterator[Installed]:
    """Yield one installed expert of the base for each set of adapter kinds and dtypes."""
    seen = set[frozenset[tuple[str, str]]]()
    for expert in planner.inventory().experts:
        kinds = frozenset((entry.kind, entry.dtype) for entry in expert.manifest.adapters)
        if kinds not in seen and not misfit(expert, base.identity, allow_mismatch=False):
            seen.add(kinds)
            yield expert


def _run(
    engine: Engine, base: StoredBase, like: RouteRequest, experts: tuple[Forced, ...]
) -> RunResult:
    wishes = SamplingWishes(greedy=True, max_tokens=_TOKENS)
    route = replace(like, prompt=_PROMPT, base_alone=not experts, wishes=wishes)
    message = UserMessage(prompt=_PROMPT)
    pieces = engine.run(RunRequest(message=message, route=route, experts=experts, base=base.name))
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: RunResult = end.value
            return result
