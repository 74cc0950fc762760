"""The official client on a server of its own: what is sent, read, refused, tried again, left."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.server.api_keys import ApiKeyStore
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.server.harness import ServedPackages
from tests.server.openai.client import read_extra_fields
from tests.server.openai.scripted_base import ANSWER, HELLO, make_scripted_packages
from tests.server.openai.test_chat_answer import SCHEMA, WEATHER
from tests.server.server_process import SocketServer, run_socket_server

pytestmark = pytest.mark.all

FOREVER: Any = [{"role": "user", "content": "Say it forever"}]
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> ServedPackages:
    return make_scripted_packages(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def server(
    scripts: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SocketServer]:
    folder = tmp_path_factory.mktemp("open")
    with run_socket_server(scripts.make_home(folder / "home"), folder / "log") as one:
        yield one


@pytest.fixture(scope="module")
def narrow(
    scripts: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SocketServer]:
    """One that writes one text at a time, and lets no job wait that is not prepared."""
    folder = tmp_path_factory.mktemp("narrow")
    options = ("--rows", "1", "--queue", "1")
    with run_socket_server(scripts.make_home(folder / "home"), folder / "log", *options) as one:
        yield one


def client_of(server: SocketServer, **options: Any) -> openai.OpenAI:
    given = {"api_key": "none", "base_url": server.base_url, "max_retries": 0, "timeout": 60}
    return openai.OpenAI(**{**given, **options})


@pytest.fixture
def client(server: SocketServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def test_a_chat_and_its_request_id(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, temperature=0)
    assert answer.choices[0].message.content == "".join(HELLO)
    assert answer._request_id
    assert answer._request_id.startswith("req_")


def test_a_stream_comes_word_by_word(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=FOREVER, temperature=0, stream=True, max_tokens=2000
    )
    with stream:
        begin = next(iter(stream))
        words = [chunk.choices[0].delta.content for chunk, _ in zip(stream, range(4), strict=False)]
    assert begin.choices[0].delta.role == "assistant"
    assert words == ["On", " and", "On", " and"]


def test_a_round_trip_of_a_tool(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "The weather in Paris?"}]
    called = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    message = called.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = client.chat.completions.create(
        model="tiny", messages=[*messages, message, result], tools=[WEATHER]
    )
    assert answer.choices[0].message.content == "".join(ANSWER)


def test_json_is_checked_afterwards(client: openai.OpenAI) -> None:
    for said, passed in (("Sort, as JSON", True), ("Sort, broken", False)):
        messages: Any = [{"role": "user", "content": said}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, response_format=SCHEMA
        )
        assert read_extra_fields(answer)["validation_passed"] is passed


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="[hello]", temperature=0)
    assert answer.choices[0].text == "".join(HELLO)
    assert [model.id for model in client.models.list()] == ["tiny", "auto", "acme/sql"]
    assert client.models.retrieve("acme/sql").id == "acme/sql"


def test_the_async_client_asks_many_things_at_once(server: SocketServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(api_key="none", base_url=server.base_url) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="tiny", messages=HI, temperature=0)
                    for _ in range(32)
                )
            )
            stream = await client.chat.completions.create(
                model="tiny", messages=HI, temperature=0, stream=True
            )
            words = [one.choices[0].delta.content or "" async for one in stream]
        return [str(one.choices[0].message.content) for one in answers] + ["".join(words)]

    assert asyncio.run(ask()) == ["".join(HELLO)] * 33


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "gpt-5"}, openai.NotFoundError),
        ({"model": "acme/none"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "a" * 20_000}]}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "a" * (17 << 20)}]}, openai.APIStatusError),
    ],
    ids=["field", "model", "expert", "context", "size"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "streamed"])
def test_what_is_refused_raises_the_class_of_the_client(
    client: openai.OpenAI, fields: Any, kind: type[openai.APIStatusError], stream: bool
) -> None:
    given: Any = {"model": "tiny", "messages": HI, **fields, "stream": stream}
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**given)
    assert refused.value.status_code < 500
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"]


def test_a_time_that_is_over_ends_the_answer_where_it_is(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=FOREVER, max_tokens=16_000, extra_body={"timeout_ms": 500}
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert str(choice.message.content).startswith("On and")
    assert read_extra_fields(answer)["answers"][0]["finish_reason"] == "timeout"


def test_the_clients_own_time_ends_the_job(server: SocketServer) -> None:
    before = server.read_metric('expertctl_jobs_total{outcome="cancelled"}')
    with client_of(server, timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="tiny", messages=FOREVER, max_tokens=16_000)
    wait_until(lambda: server.read_metric('expertctl_jobs_total{outcome="cancelled"}') > before)


def wait_until(holds: Any, seconds: float = 30.0) -> None:
    """Ask the server until it says so; each question takes a while by itself."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until


def test_a_stream_that_is_closed_frees_its_row(narrow: SocketServer) -> None:
    with client_of(narrow) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=FOREVER, stream=True, max_tokens=16_000
        )
        next(iter(stream))
        assert narrow.read_metric("vllm:num_requests_running") == 1
        stream.close()
        answer = client.chat.completions.create(model="tiny", messages=HI, temperature=0)
        assert answer.choices[0].message.content == "".join(HELLO)
        assert narrow.read_metric("vllm:num_requests_running") == 0


def test_a_full_queue_is_told_with_the_time_to_come_again(narrow: SocketServer) -> None:
    """The row is taken, two jobs are prepared and one waits: for one more there is no place."""
    with client_of(narrow) as client, ThreadPoolExecutor(6) as pool:
        begun = [pool.submit(endless, narrow) for _ in range(6)]
        wait_until(lambda: narrow.read_metric("expertctl_queue_jobs") == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model="tiny", messages=HI)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "rate_limit_exceeded"
        for one in begun:
            one.result()


def endless(server: SocketServer) -> None:
    """Ask for more than there is time for; what waits until then, or cannot, gets no answer."""
    with client_of(server) as client:
        try:
            client.chat.completions.create(
                model="tiny", messages=FOREVER, max_tokens=16_000, extra_body={"timeout_ms": 5_000}
            )
        except openai.APIStatusError as error:
            if error.status_code not in {408, 429, 503}:
                raise


def test_the_client_comes_again_by_itself_when_it_was_told_to(narrow: SocketServer) -> None:
    sent: list[int] = []

    def count(response: httpx2.Response) -> None:
        sent.append(response.status_code)

    inner = openai.DefaultHttpxClient(event_hooks={"response": [count]})
    with (
        client_of(narrow, max_retries=8, http_client=inner) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        begun = [pool.submit(endless, narrow) for _ in range(6)]
        wait_until(lambda: narrow.read_metric("expertctl_queue_jobs") == 1)
        answer = client.chat.completions.create(model="tiny", messages=HI, temperature=0)
        for one in begun:
            one.result()
    assert answer.choices[0].message.content == "".join(HELLO)
    assert sent[0] == 429
    assert sent[-1] == 200


def test_keys_are_demanded_where_there_are_some_and_have_limits(
    scripts: ServedPackages, tmp_path: Path
) -> None:
    user_home = scripts.make_home(tmp_path / "home")
    keys = ApiKeyStore(user_home.home.api_keys)
    ann = keys.create("ann", now=time.time(), requests_per_minute=2).secret
    with run_socket_server(user_home, tmp_path / "log") as server:
        with client_of(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.chat.completions.create(model="tiny", messages=HI)
            assert refused.value.code == "invalid_api_key"
        with client_of(server, api_key=ann) as client:
            for _ in range(2):
                client.chat.completions.create(model="tiny", messages=HI)
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="tiny", messages=HI)


def test_greedy_answers_are_those_of_run(stock: ServedPackages, tmp_path: Path) -> None:
    user_home = stock.make_home(tmp_path / "home")
    plans = [(), ("acme/sql",), ("acme/json", "acme/dates")]
    with run_socket_server(user_home, tmp_path / "log") as server, client_of(server) as client:
        answers = [
            client.chat.completions.create(
                model="+".join(plan) or "tiny", messages=HI, temperature=0, max_tokens=24
            )
            for plan in plans
        ]
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    engine = LocalEngine(planner, budget=64 << 20)
    for plan, answer in zip(plans, answers, strict=True):
        result = run(engine, plan)
        assert answer.choices[0].message.content == result.generated.text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(result.generated.tokens)
        assert answer.usage.prompt_tokens == result.prompt_tokens
        identity = result.planned.result.plan.identity
        assert read_extra_fields(answer)["plan"]["identity"] == str(identity)


def run(engine: LocalEngine, plan: tuple[str, ...]) -> RunResult:
    route = RouteRequest(
        prompt="Hi",
        sampling=SamplingOverrides(greedy=True, max_tokens=24),
        base_alone=not plan,
    )
    request = RunRequest(
        message=UserMessage(prompt="Hi"),
        turns=(ConversationMessage("user", "Hi"),),
        route=route,
        experts=tuple(ForcedExpert(Reference.parse(name)) for name in plan),
    )
    stream = engine.run(request)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            result: RunResult = end.value
            return result
