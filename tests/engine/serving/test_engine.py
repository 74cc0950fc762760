"""The engine of a server: what each job gets is what it would get alone."""

import queue
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving import loop, model_runner
from expertctl.engine.serving import request as request_module
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    JobStarted,
)
from expertctl.engine.torch.devices import translate_device_errors
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import (
    BudgetError,
    CancelledError,
    DeviceError,
    ExpertError,
    NotFoundError,
    RateLimitError,
    TimedOutError,
    UsageError,
)
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import (
    MAX_WAIT_SECONDS,
    adapt_batching,
    engine_packages,
    make_request,
    open_engine_harness,
)
from tests.server.harness import write_routed_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "user_home"]

NAMES = ("sql", "go", "rust", "lisp")


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(
        *(engine_packages.package(f"acme/{name}", seed=n) for n, name in enumerate(NAMES))
    )


def planner(user_home: HomeFixture) -> Planner:
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


@pytest.fixture
def settings() -> EngineConfig:
    return EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=4, queue=32))


@pytest.fixture(params=[NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])
def numpy_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def engine(
    user_home: HomeFixture, settings: EngineConfig, numpy_below: int
) -> Iterator[ServingEngine]:
    engine = ServingEngine(planner(user_home), settings, numpy_below=numpy_below)
    engine.start()
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()
    engine.check_integrity()
    assert engine._runner.budget.used == 0  # nothing is left pinned, lent or reserved
    engine._runner.resources.check_integrity()


def request(
    prompt: str = "Sort: 3, 1, 2", *experts: str, max_tokens: int = 12, **wishes: Any
) -> RunRequest:
    wished = SamplingOverrides(max_tokens=max_tokens, **(wishes or {"greedy": True}))
    route = RouteRequest(prompt=prompt, seed=0, sampling=wished, base_alone=not experts)
    forced = tuple(ForcedExpert(Reference.parse(f"acme/{name}")) for name in experts)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=forced)


ENDLESS = request("Sort: 1", "sql", max_tokens=100_000)
"""Goes on until the context is full."""


def job(wanted: RunRequest, **options: Any) -> GenerationJob:
    return GenerationJob(id=uuid.uuid4().hex, request=wanted, **options)


class EventReader:
    """Takes the events of one job."""

    def __init__(self, engine: ServingEngine, wanted: GenerationJob) -> None:
        self.events: list[JobEvent] = []
        self._queue: queue.Queue[JobEvent] = queue.Queue()
        self.id = wanted.id
        engine.submit(wanted, self._queue.put)

    def next(self) -> JobEvent:
        event = self._queue.get(timeout=60)
        self.events.append(event)
        return event

    def end(self) -> JobFinished:
        while not isinstance(event := self.next(), JobFinished):
            if isinstance(event, JobFailed):
                raise event.error
        assert self._queue.empty()
        return event

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, OutputDelta))


def alone(user_home: HomeFixture, wanted: RunRequest, numpy_below: int) -> RunResult:
    """What `run` answers."""
    engine = LocalEngine(planner(user_home), budget=32 << 20, numpy_below=numpy_below)
    stream = engine.run(wanted)
    result = yield_of(stream)
    assert isinstance(result, RunResult)
    return result


def yield_of(stream: Generator[str, None, RunResult]) -> RunResult:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of the stream


def test_jobs_with_different_plans_get_what_each_gets_alone(
    engine: ServingEngine, user_home: HomeFixture, numpy_below: int
) -> None:
    wanted = [request(f"Sort: {n}, 1", name) for n, name in enumerate(NAMES)]
    wanted += [request("Sort: 9, 1"), request("Say it", "sql", "go")]
    readers = [EventReader(engine, job(one)) for one in wanted]
    for one, reader in zip(wanted, readers, strict=True):
        [result] = reader.end().results
        expected = alone(user_home, one, numpy_below)
        assert result.generated.tokens == expected.generated.tokens
        assert result.generated.text == expected.generated.text == reader.text
        assert result.planned.result.plan.identity == expected.planned.result.plan.identity
        assert result.prompt_tokens == expected.prompt_tokens
        assert isinstance(reader.events[0], JobStarted)
    assert len({reader.text for reader in readers}) > 3  # the experts say different things


def test_several_answers_to_one_prompt_have_seeds_of_their_own_and_the_first_is_that_of_a_run(
    engine: ServingEngine, user_home: HomeFixture, numpy_below: int
) -> None:
    wanted = request("Sort: 3, 1", "sql", temperature=1.5, max_tokens=16)
    reader = EventReader(engine, job(wanted, answers=3))
    results = reader.end().results
    assert [len(result.generated.tokens) for result in results] == [16, 16, 16]
    assert len({result.generated.tokens for result in results}) == 3
    assert results[0].generated.tokens == alone(user_home, wanted, numpy_below).generated.tokens
    for number, result in enumerate(results):
        pieces = [e for e in reader.events if isinstance(e, OutputDelta) and e.number == number]
        assert "".join(piece.text for piece in pieces) == result.generated.text


def test_more_answers_than_rows_are_refused_at_once(engine: ServingEngine) -> None:
    with pytest.raises(UsageError, match="5 answers requested, at most 4 are possible"):
        engine.submit(job(request(), answers=5), lambda _: None)


def test_more_jobs_than_rows_are_all_answered_in_turn(engine: ServingEngine) -> None:
    readers = [EventReader(engine, job(request(f"Sort: {n}"))) for n in range(12)]
    ends = [reader.end() for reader in readers]
    assert all(1 <= len(end.results[0].generated.tokens) <= 12 for end in ends)
    assert engine.take_snapshot().totals.finished == 12
    assert engine.take_snapshot().waiting == engine.take_snapshot().running == 0


def test_a_full_queue_refuses_and_says_when_to_come_again(user_home: HomeFixture) -> None:
    engine = ServingEngine(
        planner(user_home),
        EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1, queue=2)),
    )
    engine.start()
    try:
        readers, refused = list[EventReader](), list[RateLimitError]()
        for number in range(20):
            try:
                readers.append(EventReader(engine, job(request(f"Sort: {number}", max_tokens=64))))
            except RateLimitError as error:
                refused.append(error)
        assert refused
        assert "2 jobs are waiting" in refused[0].message
        assert 1 <= refused[0].retry_after <= 60
        assert engine.take_snapshot().totals.refused == len(refused)
        for reader in readers:
            reader.end()
    finally:
        engine.close()


def test_a_cancelled_text_ends_where_it_is_and_frees_its_row(engine: ServingEngine) -> None:
    reader = EventReader(engine, job(ENDLESS))
    while not isinstance(reader.next(), OutputDelta):
        pass
    engine.cancel(reader.id)
    [result] = reader.end().results
    assert result.generated.finish_reason == "cancelled"
    assert 0 < len(result.generated.tokens) < 4096
    assert engine.take_snapshot().running == 0
    assert engine.take_snapshot().totals.cancelled == 1


def test_a_job_that_is_cancelled_while_it_waits_never_begins(user_home: HomeFixture) -> None:
    engine = ServingEngine(
        planner(user_home),
        EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1, queue=8)),
    )
    engine.start()
    try:
        first = EventReader(engine, job(ENDLESS))
        others = [EventReader(engine, job(request(f"Sort: {n}"))) for n in range(5)]
        engine.cancel(others[-1].id)
        with pytest.raises(CancelledError):
            others[-1].end()
        assert not any(isinstance(event, JobStarted) for event in others[-1].events)
        engine.cancel(first.id)
        for other in others[:-1]:
            other.end()
    finally:
        engine.close()


def test_a_deadline_gives_what_is_there_and_says_so(
    engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = EventReader(engine, job(ENDLESS, deadline=time.monotonic() + 1000))
    while not isinstance(reader.next(), OutputDelta):
        pass
    later = time.monotonic() + 1000
    monkeypatch.setattr(request_module, "now", lambda: later)
    [result] = reader.end().results
    assert result.generated.finish_reason == "timeout"
    assert reader.text == result.generated.text != ""


def test_a_deadline_before_the_answer_begins_is_an_error(engine: ServingEngine) -> None:
    reader = EventReader(engine, job(request(), deadline=time.monotonic() - 1))
    with pytest.raises(TimedOutError, match="passed before it started"):
        reader.end()


def test_an_unknown_expert_fails_its_own_job_and_no_other(engine: ServingEngine) -> None:
    bad = EventReader(engine, job(request("Sort: 1", "cobol")))
    good = EventReader(engine, job(request("Sort: 1", "sql")))
    with pytest.raises(NotFoundError, match="cobol"):
        bad.end()
    assert good.end().results[0].generated.tokens


def test_a_prompt_that_cannot_fit_is_refused_and_the_next_is_answered(
    engine: ServingEngine,
) -> None:
    with pytest.raises(UsageError, match="tokens"):
        EventReader(engine, job(request("word " * 9000))).end()
    assert EventReader(engine, job(request())).end().results[0].generated.tokens


def test_a_context_that_is_asked_for_holds_prompt_and_answer(engine: ServingEngine) -> None:
    whole = EventReader(engine, job(request())).end().results[0]
    size = whole.prompt_tokens + 3
    [cut] = EventReader(engine, job(replace(request(), context_size=size))).end().results
    assert cut.generated.finish_reason == "length"
    assert cut.generated.tokens == whole.generated.tokens[:3]
    with pytest.raises(UsageError, match=f"is {whole.prompt_tokens} tokens with the answer"):
        EventReader(engine, job(replace(request(), context_size=whole.prompt_tokens))).end()
    beyond = replace(request(), context_size=10**9)
    assert (
        EventReader(engine, job(beyond)).end().results[0].generated.tokens == whole.generated.tokens
    )


def test_the_experts_are_told_with_those_that_are_in_memory(engine: ServingEngine) -> None:
    def in_memory() -> set[str]:
        return {one.expert.ref for one in engine.list_experts().result() if one.in_memory}

    assert {str(one.expert.stored.package) for one in engine.list_experts().result()} == {
        f"acme/{name}" for name in NAMES
    }
    assert all(one.fits for one in engine.list_experts().result())
    before = in_memory()
    assert before <= {"acme/go@1.0.0"}  # what kernels were compiled for
    EventReader(engine, job(request("Sort: 1", "sql"))).end()
    assert in_memory() == before | {"acme/sql@1.0.0"}


def test_what_a_job_would_wait_is_known_before_it_comes(user_home: HomeFixture) -> None:
    engine = ServingEngine(
        planner(user_home), EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1))
    )
    engine.start()
    assert engine.estimate_wait() == 0
    readers = [EventReader(engine, job(ENDLESS)) for _ in range(3)]
    assert engine.estimate_wait() > 0
    for reader in readers:
        engine.cancel(reader.id)
    engine.close()


def test_the_scores_of_tokens_are_those_of_the_model(engine: ServingEngine) -> None:
    reader = EventReader(engine, job(request("Sort: 1", "sql"), logprobs=3))
    [result] = reader.end().results
    drawn = [one for e in reader.events if isinstance(e, OutputDelta) for one in e.sampled]
    assert tuple(one.chosen.token for one in drawn) == result.generated.tokens
    for one in drawn:
        assert one.likeliest[0].token == one.chosen.token  # greedy
        assert len(one.likeliest) == 3
        scores = [likely.logprob for likely in one.likeliest]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] < 0


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(engine: ServingEngine) -> None:
    wanted = replace(request("one two three four five six seven eight"), cache_key="a/1")
    first = EventReader(engine, job(wanted)).end().results[0]
    again = EventReader(engine, job(wanted)).end().results[0]
    other = EventReader(engine, job(replace(wanted, cache_key="b/1"))).end().results[0]
    assert again.kv_reused_tokens == first.prompt_tokens - 1
    assert other.kv_reused_tokens == 0
    assert again.generated.tokens == first.generated.tokens == other.generated.tokens
    engine.forget("a/1")
    assert EventReader(engine, job(wanted)).end().results[0].kv_reused_tokens == 0


def test_another_base_is_refused(engine: ServingEngine) -> None:
    with pytest.raises(UsageError, match="serves market-base, not other"):
        engine.submit(job(replace(request(), base="other")), lambda _: None)


def test_closing_lets_what_is_here_end_within_its_time(user_home: HomeFixture) -> None:
    engine = ServingEngine(
        planner(user_home), EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1))
    )
    engine.start()
    readers = [EventReader(engine, job(request(f"Sort: {n}", "sql"))) for n in range(3)]
    engine.close(seconds=60)
    assert [len(reader.end().results[0].generated.tokens) for reader in readers] == [12, 12, 12]
    engine.check_integrity()


def test_an_idle_engine_ends_without_another_look_at_the_clock(
    engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "POLL_SECONDS", 10 * MAX_WAIT_SECONDS)
    EventReader(engine, job(request("Sort: 1"))).end()  # from now on it looks so rarely
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(MAX_WAIT_SECONDS)
    assert not closing.is_alive()


def test_closing_at_once_calls_off_what_is_here_and_takes_nothing_more(
    user_home: HomeFixture,
) -> None:
    engine = ServingEngine(
        planner(user_home), EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1))
    )
    engine.start()
    first, second = EventReader(engine, job(ENDLESS)), EventReader(engine, job(ENDLESS))
    while not isinstance(first.next(), OutputDelta):
        pass
    engine.close()
    assert first.end().results[0].generated.finish_reason == "cancelled"
    with pytest.raises(CancelledError):
        second.end()
    with pytest.raises(RateLimitError, match="ending"):
        engine.submit(job(request()), lambda _: None)
    engine.check_integrity()


def bytes_at_rest(user_home: HomeFixture, settings: EngineConfig) -> int:
    engine = ServingEngine(planner(user_home), settings)
    engine.start()
    try:
        snapshot = engine.take_snapshot()
        return snapshot.limit - snapshot.kv_limit
    finally:
        engine.close()


def test_a_job_that_could_not_have_its_memory_even_alone_is_refused_alone(
    user_home: HomeFixture, settings: EngineConfig
) -> None:
    budget = bytes_at_rest(user_home, settings) + (300 << 10)
    engine = ServingEngine(planner(user_home), replace(settings, memory_budget=budget))
    engine.start()
    try:
        with pytest.raises(BudgetError, match="of 512 tokens"):
            EventReader(engine, job(request("Sort: 2", max_tokens=100_000))).end()
        assert EventReader(engine, job(request("Sort: 1"))).end().results[0].generated.tokens
        assert engine.take_snapshot().peak <= budget
    finally:
        engine.close()


def peak_of(user_home: HomeFixture, settings: EngineConfig, wanted: RunRequest) -> int:
    """What a job takes that is alone."""
    engine = ServingEngine(planner(user_home), settings)
    engine.start()
    try:
        EventReader(engine, job(wanted)).end()
        return engine.take_snapshot().peak
    finally:
        engine.close()


def test_plans_that_do_not_fit_together_are_answered_one_after_the_other(
    user_home: HomeFixture, settings: EngineConfig
) -> None:
    """Room for the plan of one expert, its loading, and little more."""
    budget = peak_of(user_home, settings, request("Sort: 1", "sql"))
    engine = ServingEngine(planner(user_home), replace(settings, memory_budget=budget))
    engine.start()
    try:
        readers = [
            EventReader(engine, job(request(f"Sort: {n}", name)))
            for n in range(3)
            for name in NAMES
        ]
        assert all(reader.end().results for reader in readers)
        assert engine.take_snapshot().peak <= budget
        assert engine.take_snapshot().traffic["device"].evictions >= len(NAMES) - 1
        engine.check_integrity()
    finally:
        engine.close()


def test_prompts_that_warm_up_bring_their_experts_before_the_first_job(
    user_home: HomeFixture, settings: EngineConfig
) -> None:
    told = list[str]()
    warm = adapt_batching(settings, warm=("sql sql", "word " * 9000))
    engine = ServingEngine(planner(user_home), warm, tell=told.append)
    engine.start()
    try:
        snapshot = engine.take_snapshot()
        assert snapshot.totals.finished == 0  # nobody asked
        assert snapshot.counts.prompt_tokens > 0
        assert snapshot.traffic["device"].loads >= 1
        assert planner(user_home).catalogue.history.read_usage_counts() == {}
        loading, memory, said = told
        assert memory.startswith("memory: ")
        assert loading.startswith("loading ")
        assert "warming up" in said
        assert "tokens" in said
    finally:
        engine.close()


def test_a_deadline_within_several_answers_gives_those_that_began(
    user_home: HomeFixture, settings: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job has the row that the second answer waits for."""
    endless = make_request("Sort: 1", max_tokens=100_000)
    with open_engine_harness(
        Home(user_home.root), adapt_batching(settings, rows=2)
    ) as package_factory:
        other = package_factory.submit_until_ready(endless)
        package_factory.loop.run_pass()
        deadline = time.monotonic() + 1000
        asked = package_factory.submit_until_ready(endless, answers=2, deadline=deadline)
        package_factory.step_until(lambda: asked.has_started)
        monkeypatch.setattr(request_module, "now", lambda: deadline)
        package_factory.finish(asked)
        assert [one.generated.finish_reason for one in asked.results] == ["timeout"]
        assert not other.is_over
        package_factory.scheduler.cancel(other.state.job.id)
        package_factory.finish(other)
        package_factory.check_idle()


def test_a_bug_in_a_pass_ends_its_jobs_and_the_next_is_answered(
    engine: ServingEngine,
) -> None:
    loop = engine._loop
    assert loop is not None
    model = loop.batch._model

    class Broken:
        prefill = staticmethod(model.prefill)

        def step(self, texts: Any) -> Any:
            loop.batch._model = model
            raise ZeroDivisionError

    loop.batch._model = Broken()  # type: ignore[assignment]
    with pytest.raises(ExpertError, match="the server failed"):
        EventReader(engine, job(request())).end()
    assert engine.is_working
    assert EventReader(engine, job(request())).end().results[0].generated.tokens


def breakable(user_home: HomeFixture) -> tuple[ServingEngine, list[str], list[bool]]:
    """An engine that was started, what it tells, and whether it said that it broke."""
    told, broken = list[str](), list[bool]()
    settings = EngineConfig(memory_budget=32 << 20, batching=BatchingConfig(rows=1))
    engine = ServingEngine(
        planner(user_home), settings, tell=told.append, on_failure=lambda: broken.append(True)
    )
    engine.start()
    return engine, told, broken


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["a step", "loading"])
def test_a_device_that_fails_ends_the_engine_with_its_way_out(
    where: str, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told_all, broken = breakable(user_home)
    loop = engine._loop
    assert loop is not None

    def where_it_broke(*_: Any) -> Any:
        with translate_device_errors():
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")

    if where == "a step":
        broken_model = SimpleNamespace(step=where_it_broke, prefill=loop.batch._model.prefill)
        monkeypatch.setattr(loop.batch, "_model", broken_model)
    else:
        monkeypatch.setattr(engine._runner.resources, "load_plan", where_it_broke)
    readers = [EventReader(engine, job(request())) for _ in range(3)]
    for reader in readers:
        with pytest.raises(DeviceError, match="the CUDA device failed") as told:
            reader.end()
        assert "restart" in told.value.hint
    loop.join()
    assert (engine.is_working, broken) == (False, [True])
    log = "".join(told_all)
    assert "in where_it_broke" in log, "not in a thread that was told of it"
    assert "nvidia-smi" in log
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_start_that_is_called_off_while_the_base_is_read_leaves_nothing(
    user_home: HomeFixture, settings: EngineConfig
) -> None:
    def call_off(text: str) -> None:
        if text.startswith("loading "):
            starting._runner.stop()

    starting = ServingEngine(planner(user_home), settings, tell=call_off, numpy_below=0)
    with pytest.raises(CancelledError):
        starting.start()
    starting.close()
    assert starting._runner.budget.used == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_fails_while_all_is_warmed_up_fails_the_start(
    user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineConfig(
        memory_budget=32 << 20, batching=BatchingConfig(rows=1, warm=("Hello", "there"))
    )
    engine = ServingEngine(planner(user_home), settings)
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")
    monkeypatch.setattr(engine._runner.resources, "load_plan", Mock(side_effect=error))
    monkeypatch.setattr(model_runner, "translate_errors", lambda _: translate_device_errors())
    with pytest.raises(DeviceError, match="the CUDA device failed"):
        engine.start()
    assert engine._loop is not None
    engine._loop.join()
    assert not engine.is_working


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_routed_experts_in_disorder_answer_nobody(user_home: HomeFixture, tmp_path: Path) -> None:
    """A pass that failed left the table of experts half written; whoever asks next is not told."""
    user_home.bases.add(write_routed_base(tmp_path / "routed"), name="routed")
    broken = list[bool]()
    settings = EngineConfig(base="routed", memory_budget=64 << 20, batching=BatchingConfig(rows=1))
    engine = ServingEngine(planner(user_home), settings, on_failure=lambda: broken.append(True))
    engine.start()
    assert EventReader(engine, job(request())).end().results[0].generated.tokens
    cache = engine._runner.model.experts
    assert isinstance(cache, ExpertCache)

    def lose_all() -> None:
        cache._memory.places[...] = 0

    engine._scheduler.control_queue.append(lose_all)
    for _ in range(2):
        with pytest.raises((ExpertError, RateLimitError)):
            EventReader(engine, job(request())).end()
    assert engine._loop is not None
    engine._loop.join()
    assert (engine.is_working, broken) == (False, [True])
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_ends_unforeseen_leaves_nobody_waiting(user_home: HomeFixture) -> None:
    engine, told, broken = breakable(user_home)
    readers = [EventReader(engine, job(ENDLESS)) for _ in range(4)]
    while not isinstance(readers[0].next(), OutputDelta):
        pass

    def fail() -> None:
        raise ZeroDivisionError

    engine._scheduler.control_queue.append(fail)
    for reader in readers:
        with pytest.raises(ExpertError, match="the server failed"):
            reader.end()
    assert engine._loop is not None
    engine._loop.join()
    assert not engine.is_working
    assert broken == [True]
    assert "ZeroDivisionError" in told[-1]
    with pytest.raises(RateLimitError):
        engine.submit(job(request()), lambda _: None)
