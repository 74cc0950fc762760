"""The engine of a server: what each job gets is what it would get alone."""

import queue
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from expertctl.engine.accelerator import told_when_full
from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.engine.serving import ticket
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.job import Event, Failed, Finished, Job, Piece, Started
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
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from expertctl.settings import Home, Settings
from tests.engine.market import Market
from tests.engine.serving.workshop import market
from tests.server.routed import write_routed
from tests.store.shop import House, fast, house

__all__ = ["fast", "house", "market"]

NAMES = ("sql", "go", "rust", "lisp")


@pytest.fixture(autouse=True)
def known(house: House, market: Market) -> None:
    house.bases.add(market.base_dir)
    house.trusting("acme")
    house.install(*(market.package(f"acme/{name}", seed=n) for n, name in enumerate(NAMES)))


def planner(house: House) -> Planner:
    return Planner.open(Settings(Home(house.root), encoder="lexical"))


@pytest.fixture
def settings() -> BatchSettings:
    return BatchSettings(budget=32 << 20, rows=4, queue=32)


@pytest.fixture(params=[TORCH_BELOW, 0], ids=["torch", "kernels"])
def torch_below(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def engine(house: House, settings: BatchSettings, torch_below: int) -> Iterator[BatchEngine]:
    engine = BatchEngine(planner(house), settings, torch_below=torch_below)
    engine.start()
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()
    engine.check_integrity()
    assert engine._house.budget.used == 0  # nothing is left pinned, lent or reserved
    engine._house.residents.check_integrity()


def request(
    prompt: str = "Sort: 3, 1, 2", *experts: str, max_tokens: int = 12, **wishes: Any
) -> RunRequest:
    wished = SamplingWishes(max_tokens=max_tokens, **(wishes or {"greedy": True}))
    route = RouteRequest(prompt=prompt, seed=0, wishes=wished, base_alone=not experts)
    forced = tuple(Forced(Reference.parse(f"acme/{name}")) for name in experts)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=forced)


ENDLESS = request("Sort: 1", "sql", max_tokens=100_000)
"""Goes on until the context is full."""


def job(wanted: RunRequest, **options: Any) -> Job:
    return Job(id=uuid.uuid4().hex, request=wanted, **options)


class Reader:
    """Takes the events of one job."""

    def __init__(self, engine: BatchEngine, wanted: Job) -> None:
        self.events: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()
        self.id = wanted.id
        engine.submit(wanted, self._queue.put)

    def next(self) -> Event:
        event = self._queue.get(timeout=60)
        self.events.append(event)
        return event

    def end(self) -> Finished:
        while not isinstance(event := self.next(), Finished):
            if isinstance(event, Failed):
                raise event.error
        assert self._queue.empty()
        return event

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))


def alone(house: House, wanted: RunRequest, torch_below: int) -> RunResult:
    """What `run` answers."""
    engine = Engine(planner(house), budget=32 << 20, torch_below=torch_below)
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
    engine: BatchEngine, house: House, torch_below: int
) -> None:
    wanted = [request(f"Sort: {n}, 1", name) for n, name in enumerate(NAMES)]
    wanted += [request("Sort: 9, 1"), request("Say it", "sql", "go")]
    readers = [Reader(engine, job(one)) for one in wanted]
    for one, reader in zip(wanted, readers, strict=True):
        [result] = reader.end().results
        expected = alone(house, one, torch_below)
        assert result.generated.tokens == expected.generated.tokens
        assert result.generated.text == expected.generated.text == reader.text
        assert result.planned.result.plan.identity == expected.planned.result.plan.identity
        assert result.prompt_tokens == expected.prompt_tokens
        assert isinstance(reader.events[0], Started)
    assert len({reader.text for reader in readers}) > 3  # the experts say different things


def test_several_answers_to_one_prompt_have_seeds_of_their_own_and_the_first_is_that_of_a_run(
    engine: BatchEngine, house: House, torch_below: int
) -> None:
    wanted = request("Sort: 3, 1", "sql", temperature=1.5, max_tokens=16)
    reader = Reader(engine, job(wanted, texts=3))
    results = reader.end().results
    assert [len(result.generated.tokens) for result in results] == [16, 16, 16]
    assert len({result.generated.tokens for result in results}) == 3
    assert results[0].generated.tokens == alone(house, wanted, torch_below).generated.tokens
    for number, result in enumerate(results):
        pieces = [e for e in reader.events if isinstance(e, Piece) and e.number == number]
        assert "".join(piece.text for piece in pieces) == result.generated.text


def test_more_answers_than_rows_are_refused_at_once(engine: BatchEngine) -> None:
    with pytest.raises(UsageError, match="5 answers are asked for, 4 are written at a time"):
        engine.submit(job(request(), texts=5), lambda _: None)


def test_more_jobs_than_rows_are_all_answered_in_turn(engine: BatchEngine) -> None:
    readers = [Reader(engine, job(request(f"Sort: {n}"))) for n in range(12)]
    ends = [reader.end() for reader in readers]
    assert all(1 <= len(end.results[0].generated.tokens) <= 12 for end in ends)
    assert engine.snapshot().totals.finished == 12
    assert engine.snapshot().waiting == engine.snapshot().running == 0


def test_a_full_queue_refuses_and_says_when_to_come_again(house: House) -> None:
    engine = BatchEngine(planner(house), BatchSettings(budget=32 << 20, rows=1, queue=2))
    engine.start()
    try:
        readers, refused = list[Reader](), list[RateLimitError]()
        for number in range(20):
            try:
                readers.append(Reader(engine, job(request(f"Sort: {number}", max_tokens=64))))
            except RateLimitError as error:
                refused.append(error)
        assert refused
        assert "2 jobs wait already" in refused[0].message
        assert 1 <= refused[0].retry_after <= 60
        assert engine.snapshot().totals.refused == len(refused)
        for reader in readers:
            reader.end()
    finally:
        engine.close()


def test_a_cancelled_text_ends_where_it_is_and_frees_its_row(engine: BatchEngine) -> None:
    reader = Reader(engine, job(ENDLESS))
    while not isinstance(reader.next(), Piece):
        pass
    engine.cancel(reader.id)
    [result] = reader.end().results
    assert result.generated.finish_reason == "cancelled"
    assert 0 < len(result.generated.tokens) < 4096
    assert engine.snapshot().running == 0
    assert engine.snapshot().totals.cancelled == 1


def test_a_job_that_is_cancelled_while_it_waits_never_begins(house: House) -> None:
    engine = BatchEngine(planner(house), BatchSettings(budget=32 << 20, rows=1, queue=8))
    engine.start()
    try:
        first = Reader(engine, job(ENDLESS))
        others = [Reader(engine, job(request(f"Sort: {n}"))) for n in range(5)]
        engine.cancel(others[-1].id)
        with pytest.raises(CancelledError):
            others[-1].end()
        assert not any(isinstance(event, Started) for event in others[-1].events)
        engine.cancel(first.id)
        for other in others[:-1]:
            other.end()
    finally:
        engine.close()


def test_a_deadline_gives_what_is_there_and_says_so(
    engine: BatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(engine, job(ENDLESS, deadline=time.monotonic() + 1000))
    while not isinstance(reader.next(), Piece):
        pass
    later = time.monotonic() + 1000
    monkeypatch.setattr(ticket, "now", lambda: later)
    [result] = reader.end().results
    assert result.generated.finish_reason == "timeout"
    assert reader.text == result.generated.text != ""


def test_a_deadline_before_the_answer_begins_is_an_error(engine: BatchEngine) -> None:
    reader = Reader(engine, job(request(), deadline=time.monotonic() - 1))
    with pytest.raises(TimedOutError, match="was over before it began"):
        reader.end()


def test_an_unknown_expert_fails_its_own_job_and_no_other(engine: BatchEngine) -> None:
    bad = Reader(engine, job(request("Sort: 1", "cobol")))
    good = Reader(engine, job(request("Sort: 1", "sql")))
    with pytest.raises(NotFoundError, match="cobol"):
        bad.end()
    assert good.end().results[0].generated.tokens


def test_a_prompt_that_cannot_fit_is_refused_and_the_next_is_answered(engine: BatchEngine) -> None:
    with pytest.raises(UsageError, match="tokens"):
        Reader(engine, job(request("word " * 9000))).end()
    assert Reader(engine, job(request())).end().results[0].generated.tokens


def test_a_context_that_is_asked_for_holds_prompt_and_answer(engine: BatchEngine) -> None:
    whole = Reader(engine, job(request())).end().results[0]
    size = whole.prompt_tokens + 3
    [cut] = Reader(engine, job(replace(request(), context_size=size))).end().results
    assert cut.generated.finish_reason == "length"
    assert cut.generated.tokens == whole.generated.tokens[:3]
    with pytest.raises(UsageError, match=f"reads {whole.prompt_tokens} with the answer"):
        Reader(engine, job(replace(request(), context_size=whole.prompt_tokens))).end()
    beyond = replace(request(), context_size=10**9)
    assert Reader(engine, job(beyond)).end().results[0].generated.tokens == whole.generated.tokens


def test_the_experts_are_told_with_those_that_are_in_memory(engine: BatchEngine) -> None:
    def in_memory() -> set[str]:
        return {one.expert.ref for one in engine.experts().result() if one.in_memory}

    assert {str(one.expert.stored.package) for one in engine.experts().result()} == {
        f"acme/{name}" for name in NAMES
    }
    assert all(one.fits for one in engine.experts().result())
    before = in_memory()
    assert before <= {"acme/go@1.0.0"}  # what kernels were compiled for
    Reader(engine, job(request("Sort: 1", "sql"))).end()
    assert in_memory() == before | {"acme/sql@1.0.0"}


def test_what_a_job_would_wait_is_known_before_it_comes(house: House) -> None:
    engine = BatchEngine(planner(house), BatchSettings(budget=32 << 20, rows=1))
    engine.start()
    assert engine.expected_wait() == 0
    readers = [Reader(engine, job(ENDLESS)) for _ in range(3)]
    assert engine.expected_wait() > 0
    for reader in readers:
        engine.cancel(reader.id)
    engine.close()


def test_the_scores_of_tokens_are_those_of_the_model(engine: BatchEngine) -> None:
    reader = Reader(engine, job(request("Sort: 1", "sql"), logprobs=3))
    [result] = reader.end().results
    drawn = [one for e in reader.events if isinstance(e, Piece) for one in e.drawn]
    assert tuple(one.chosen.token for one in drawn) == result.generated.tokens
    for one in drawn:
        assert one.likeliest[0].token == one.chosen.token  # greedy
        assert len(one.likeliest) == 3
        scores = [likely.logprob for likely in one.likeliest]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] < 0


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(engine: BatchEngine) -> None:
    wanted = replace(request("one two three four five six seven eight"), cache_key="a/1")
    first = Reader(engine, job(wanted)).end().results[0]
    again = Reader(engine, job(wanted)).end().results[0]
    other = Reader(engine, job(replace(wanted, cache_key="b/1"))).end().results[0]
    assert again.kv_reused_tokens == first.prompt_tokens - 1
    assert other.kv_reused_tokens == 0
    assert again.generated.tokens == first.generated.tokens == other.generated.tokens
    engine.forget("a/1")
    assert Reader(engine, job(wanted)).end().results[0].kv_reused_tokens == 0


def test_another_base_is_refused(engine: BatchEngine) -> None:
    with pytest.raises(UsageError, match="answers on market-base, not on other"):
        engine.submit(job(replace(request(), base="other")), lambda _: None)


def test_closing_lets_what_is_here_end_within_its_time(house: House) -> None:
    engine = BatchEngine(planner(house), BatchSettings(budget=32 << 20, rows=1))
    engine.start()
    readers = [Reader(engine, job(request(f"Sort: {n}", "sql"))) for n in range(3)]
    engine.close(seconds=60)
    assert [len(reader.end().results[0].generated.tokens) for reader in readers] == [12, 12, 12]
    engine.check_integrity()


def test_closing_at_once_calls_off_what_is_here_and_takes_nothing_more(house: House) -> None:
    engine = BatchEngine(planner(house), BatchSettings(budget=32 << 20, rows=1))
    engine.start()
    first, second = Reader(engine, job(ENDLESS)), Reader(engine, job(ENDLESS))
    while not isinstance(first.next(), Piece):
        pass
    engine.close()
    assert first.end().results[0].generated.finish_reason == "cancelled"
    with pytest.raises(CancelledError):
        second.end()
    with pytest.raises(RateLimitError, match="ending"):
        engine.submit(job(request()), lambda _: None)
    engine.check_integrity()


def bytes_at_rest(house: House, settings: BatchSettings) -> int:
    engine = BatchEngine(planner(house), settings)
    engine.start()
    try:
        snapshot = engine.snapshot()
        return snapshot.limit - snapshot.kv_limit
    finally:
        engine.close()


def test_a_job_that_could_not_have_its_memory_even_alone_is_refused_alone(
    house: House, settings: BatchSettings
) -> None:
    budget = bytes_at_rest(house, settings) + (200 << 10)
    engine = BatchEngine(planner(house), replace(settings, budget=budget))
    engine.start()
    try:
        with pytest.raises(BudgetError, match="the KV cache of 512 tokens"):
            Reader(engine, job(request("Sort: 2", max_tokens=100_000))).end()
        assert Reader(engine, job(request("Sort: 1"))).end().results[0].generated.tokens
        assert engine.snapshot().peak <= budget
    finally:
        engine.close()


def peak_of(house: House, settings: BatchSettings, wanted: RunRequest) -> int:
    """What a job takes that is alone."""
    engine = BatchEngine(planner(house), settings)
    engine.start()
    try:
        Reader(engine, job(wanted)).end()
        return engine.snapshot().peak
    finally:
        engine.close()


def test_plans_that_do_not_fit_together_are_answered_one_after_the_other(
    house: House, settings: BatchSettings
) -> None:
    """Room for the plan of one expert, its loading, and little more."""
    budget = peak_of(house, settings, request("Sort: 1", "sql"))
    engine = BatchEngine(planner(house), replace(settings, budget=budget))
    engine.start()
    try:
        readers = [
            Reader(engine, job(request(f"Sort: {n}", name))) for n in range(3) for name in NAMES
        ]
        assert all(reader.end().results for reader in readers)
        assert engine.snapshot().peak <= budget
        assert engine.snapshot().traffic["device"].evictions >= len(NAMES) - 1
        engine.check_integrity()
    finally:
        engine.close()


def test_prompts_that_warm_up_bring_their_experts_before_the_first_job(
    house: House, settings: BatchSettings
) -> None:
    told = list[str]()
    warm = replace(settings, warm=("sql sql", "word " * 9000))
    engine = BatchEngine(planner(house), warm, tell=told.append)
    engine.start()
    try:
        snapshot = engine.snapshot()
        assert snapshot.totals.finished == 0  # nobody asked
        assert snapshot.counts.prompt_tokens > 0
        assert snapshot.traffic["device"].loads >= 1
        assert planner(house).catalogue.history.usages() == {}
        loading, memory, said = told
        assert memory.startswith("memory: ")
        assert loading.startswith("loading ")
        assert "warming up" in said
        assert "tokens" in said
    finally:
        engine.close()


def test_a_deadline_within_several_answers_gives_those_that_began(
    house: House, settings: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = peak_of(house, settings, ENDLESS)
    engine = BatchEngine(planner(house), replace(settings, budget=budget))
    engine.start()
    try:
        wanted = job(ENDLESS, texts=2, deadline=time.monotonic() + 1000)
        reader = Reader(engine, wanted)
        while not isinstance(reader.next(), Piece):
            pass
        later = time.monotonic() + 1000
        monkeypatch.setattr(ticket, "now", lambda: later)
        results = reader.end().results
        assert [result.generated.finish_reason for result in results] == ["timeout"]
    finally:
        engine.close()


def test_a_bug_in_a_pass_ends_its_jobs_and_the_next_is_answered(
    engine: BatchEngine,
) -> None:
    press = engine._press
    assert press is not None
    model = press.batch._model

    class Broken:
        def step(self, texts: Any) -> Any:
            press.batch._model = model
            raise ZeroDivisionError

    press.batch._model = Broken()  # type: ignore[assignment]
    with pytest.raises(ExpertError, match="the server failed"):
        Reader(engine, job(request())).end()
    assert engine.is_working
    assert Reader(engine, job(request())).end().results[0].generated.tokens


def breakable(house: House) -> tuple[BatchEngine, list[str], list[bool]]:
    """An engine that was started, what it tells, and whether it said that it broke."""
    told, broken = list[str](), list[bool]()
    settings = BatchSettings(budget=32 << 20, rows=1)
    engine = BatchEngine(
        planner(house), settings, tell=told.append, broke=lambda: broken.append(True)
    )
    engine.start()
    return engine, told, broken


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["a step", "loading"])
def test_a_device_that_fails_ends_the_engine_with_its_way_out(
    where: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told_all, broken = breakable(house)
    press = engine._press
    assert press is not None

    def where_it_broke(*_: Any) -> Any:
        with told_when_full():
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")

    if where == "a step":
        monkeypatch.setattr(press.batch, "_model", SimpleNamespace(step=where_it_broke))
    else:
        monkeypatch.setattr(engine._house.residents, "plan", where_it_broke)
    readers = [Reader(engine, job(request())) for _ in range(3)]
    for reader in readers:
        with pytest.raises(DeviceError, match="the CUDA device failed") as told:
            reader.end()
        assert "start again" in told.value.hint
    press.join()
    assert (engine.is_working, broken) == (False, [True])
    log = "".join(told_all)
    assert "in where_it_broke" in log, "not in a thread that was told of it"
    assert "nvidia-smi" in log
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_start_that_is_called_off_while_the_base_is_read_leaves_nothing(
    house: House, settings: BatchSettings
) -> None:
    def call_off(text: str) -> None:
        if text.startswith("loading "):
            starting._house.stop()

    starting = BatchEngine(planner(house), settings, tell=call_off, torch_below=0)
    with pytest.raises(CancelledError):
        starting.start()
    starting.close()
    assert starting._house.budget.used == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_fails_while_all_is_warmed_up_fails_the_start(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BatchSettings(budget=32 << 20, rows=1, warm=("Hello", "there"))
    engine = BatchEngine(planner(house), settings)
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")
    monkeypatch.setattr(engine._house.residents, "plan", Mock(side_effect=error))
    with pytest.raises(DeviceError, match="the CUDA device failed"):
        engine.start()
    assert engine._press is not None
    engine._press.join()
    assert not engine.is_working


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_routed_experts_in_disorder_answer_nobody(house: House, tmp_path: Path) -> None:
    """A pass that failed left the table of experts half written; whoever asks next is not told."""
    house.bases.add(write_routed(tmp_path / "routed"), name="routed")
    broken = list[bool]()
    settings = BatchSettings(base="routed", budget=64 << 20, rows=1)
    engine = BatchEngine(planner(house), settings, broke=lambda: broken.append(True))
    engine.start()
    assert Reader(engine, job(request())).end().results[0].generated.tokens
    cache = engine._house.model.experts
    assert isinstance(cache, ExpertCache)

    def lose_all() -> None:
        cache._memory.places[...] = 0

    engine._board.errands.append(lose_all)
    for _ in range(2):
        with pytest.raises((ExpertError, RateLimitError)):
            Reader(engine, job(request())).end()
    assert engine._press is not None
    engine._press.join()
    assert (engine.is_working, broken) == (False, [True])
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_ends_unforeseen_leaves_nobody_waiting(house: House) -> None:
    engine, told, broken = breakable(house)
    readers = [Reader(engine, job(ENDLESS)) for _ in range(4)]
    while not isinstance(readers[0].next(), Piece):
        pass

    def fail() -> None:
        raise ZeroDivisionError

    engine._board.errands.append(fail)
    for reader in readers:
        with pytest.raises(ExpertError, match="the server failed"):
            reader.end()
    assert engine._press is not None
    engine._press.join()
    assert not engine.is_working
    assert broken == [True]
    assert "ZeroDivisionError" in told[-1]
    with pytest.raises(RateLimitError):
        engine.submit(job(request()), lambda _: None)
