"""`AsyncExpertClient` and the real server: the same calls, awaited."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from expertctl.client import AsyncExpertClient
from expertctl.errors import IncompatibleError, NoAnswerError, NotFoundError, TimedOutError
from tests.client.transports import make_async_client, make_client
from tests.server.harness import BASE, EXPERTS, ServerHarness

PROMPT = "Sort: 3, 1, 2"
Work = Callable[[AsyncExpertClient], Awaitable[object]]


def run(served: ServerHarness, work: Work) -> None:
    async def inside() -> None:
        async with make_async_client(served) as client:
            await work(client)

    asyncio.run(asyncio.wait_for(inside(), 120))


def test_an_answer_is_that_of_the_other_client(served: ServerHarness) -> None:
    expected = make_client(served).infer(PROMPT, temperature=0.0, max_tokens=9, seed=1)

    async def work(client: AsyncExpertClient) -> None:
        results = await asyncio.gather(
            *(client.infer(PROMPT, temperature=0.0, max_tokens=9, seed=1) for _ in range(4))
        )
        assert {result.text for result in results} == {expected.text}
        assert results[0].plan == expected.plan

    run(served, work)


def test_a_stream_gives_chunks_and_then_the_result(served: ServerHarness) -> None:
    async def work(client: AsyncExpertClient) -> None:
        async with client.infer_stream(PROMPT, temperature=0.0, max_tokens=9) as stream:
            with pytest.raises(NoAnswerError):
                _ = stream.result
            text = "".join([chunk.text async for chunk in stream])
        assert stream.started is not None
        assert stream.result.text == text

    run(served, work)


def test_what_was_counted_is_asked_for_and_changed(served: ServerHarness) -> None:
    async def work(client: AsyncExpertClient) -> None:
        assert await client.moe() == make_client(served).moe()
        with pytest.raises(IncompatibleError, match="no routed experts"):
            await client.change_moe(mode="off")

    run(served, work)


def test_errors_are_ours(served: ServerHarness) -> None:
    async def work(client: AsyncExpertClient) -> None:
        with pytest.raises(NotFoundError, match="acme/none"):
            await client.infer(PROMPT, force_experts=["acme/none"])
        with pytest.raises(NotFoundError, match="acme/none"):
            await anext(client.infer_stream(PROMPT, force_experts=["acme/none"]))

    run(served, work)


def test_jobs_are_begun_waited_for_and_called_off(served: ServerHarness) -> None:
    async def work(client: AsyncExpertClient) -> None:
        job = await client.jobs.submit(PROMPT, temperature=0.0, max_tokens=9)
        over = await client.jobs.wait(job.job_id)
        assert over.demand_result().tokens_generated == 9
        async with client.jobs.running(PROMPT, max_tokens=100_000) as running:
            with pytest.raises(TimedOutError):
                await client.jobs.wait(running.job_id, timeout=0.0)
        assert (await client.jobs.wait(running.job_id)).status == "cancelled"
        assert (await client.jobs.cancel(running.job_id)).status == "cancelled"
        assert (await client.jobs.get(job.job_id)) == over

    run(served, work)


def test_a_route_experts_and_models_are_told(served: ServerHarness) -> None:
    async def work(client: AsyncExpertClient) -> None:
        found = await client.route(PROMPT, force_experts=["acme/sql"])
        assert [expert.ref for expert in found.plan.experts] == ["acme/sql@1.0.0"]
        assert [expert.name for expert in await client.experts()] == sorted(EXPERTS)
        assert BASE in {model.id for model in await client.models()}

    run(served, work)
