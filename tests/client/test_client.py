"""`ExpertClient` and the real server: every call, and the errors that come back as ours."""

import re
import time
from pathlib import Path

import pytest

from expertctl.client import ExpertClient, InferResult, Job
from expertctl.engine_config import WarmupConfig
from expertctl.errors import (
    CancelledError,
    IncompatibleError,
    NoAnswerError,
    NotFoundError,
    TimedOutError,
    UnauthenticatedError,
    UsageError,
)
from tests.client.transports import make_client
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, EXPERTS, ROUTED_LAYERS, ServerHarness, run_routed_app
from tests.server.harness import ROUTED_EXPERTS as ROUTED

PROMPT = "Sort: 3, 1, 2"


@pytest.fixture
def client(served: ServerHarness) -> ExpertClient:
    return make_client(served)


def endless(client: ExpertClient) -> Job:
    return client.jobs.submit(PROMPT, temperature=0.0, max_tokens=100_000)


def wait_for_text(client: ExpertClient, job: Job) -> Job:
    """The job, once there is some text of it."""
    end = time.monotonic() + 60
    while not (job := client.jobs.get(job.job_id)).text:
        assert time.monotonic() < end
    return job


def test_an_answer_is_what_the_server_says(client: ExpertClient, served: ServerHarness) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 9, "force_experts": ["acme/sql"]}
    told = served.client().post("/v1/infer", json=body).json()
    result = client.infer(PROMPT, temperature=0.0, max_tokens=9, force_experts=["acme/sql"])
    assert isinstance(result, InferResult)
    assert result.text == told["text"]
    assert result.experts_used == ("acme/sql@1.0.0",)
    assert result.plan.experts[0].content_digest == told["plan"]["experts"][0]["content_digest"]
    assert result.tokens.ids == tuple(told["tokens"]["ids"])
    assert (result.tokens_generated, result.finish_reason) == (9, "length")
    assert result.moe is None, "a dense base"
    assert result.stages.inference > 0
    assert result.validation_passed is None
    with pytest.raises(AttributeError):
        result.text = "another"  # type: ignore[misc]  # that is the point


def test_an_answer_tells_what_became_of_routed_experts(tmp_path: Path) -> None:
    with run_routed_app(tmp_path / "home") as routed:
        client = make_client(routed)
        found = [client.infer(PROMPT, temperature=0.0, max_tokens=4).moe]
        found.append(
            client.jobs.wait(client.jobs.submit(PROMPT, temperature=0.0, max_tokens=4).job_id)
            .demand_result()
            .moe
        )
    for moe in found:
        assert moe is not None
        assert (moe.miss, moe.cold, moe.layers, moe.experts) == (
            "exact",
            "read",
            ROUTED_LAYERS,
            ROUTED,
        )
        assert 0 < moe.slots < ROUTED
        assert moe.fallback_rate == pytest.approx(moe.misses / moe.requests, abs=1e-6)


def test_routed_experts_are_watched_and_told_who_stays(tmp_path: Path) -> None:
    with run_routed_app(tmp_path / "home", moe=WarmupConfig(learns=False)) as routed:
        client = make_client(routed)
        client.infer(PROMPT, temperature=0.0, max_tokens=4)
        seen = client.moe()
        assert (seen.mode, seen.base, seen.n_expert) == ("full", BASE, ROUTED)
        assert seen.residence is not None
        assert (seen.residence.miss, seen.residence.cold) == ("exact", "read")
        assert [layer.layer for layer in seen.layers] == [1, 2, 3]
        assert all(0 < layer.missed_requests <= layer.requests for layer in seen.layers)
        first = min(seen.layers[0].experts, key=lambda each: (-each[1], each[0]))[0]
        told = client.change_moe(profile=seen, pin=1, exchange=0.5)
        assert told.guide is not None
        assert told.guide.exchange == 0.5
        assert told.guide.pinned["1"] == (first,)
        assert client.change_moe(mode="update").updates == 0
        assert client.change_moe(mode="off").layers == ()
        with pytest.raises(NotFoundError, match="no usage profile was learned"):
            client.change_moe(profile=BASE, pin="50%")
        other = {"num_prompts": 1, "num_experts": 8, "layers": {}}
        with pytest.raises(IncompatibleError, match="8 routed experts in a layer"):
            client.change_moe(profile=other, pin=1)


def test_a_dense_base_has_nobody_who_could_be_missing(client: ExpertClient) -> None:
    assert client.moe().layers == ()
    with pytest.raises(IncompatibleError, match="no routed experts"):
        client.change_moe(reset=True)
    with pytest.raises(UsageError, match="changes nothing"):
        client.change_moe()


def test_every_option_reaches_the_server(client: ExpertClient) -> None:
    result = client.infer(
        "Sort these",
        template="{body}\n{prompt}",
        body="3, 1, 2",
        temperature=0.5,
        max_tokens=3,
        top_p=0.9,
        top_k=10,
        min_p=0.01,
        repetition_penalty=1.2,
        exclude_experts=["acme/sql"],
        max_experts=2,
        context_size=200,
        stop=["END"],
        seed=11,
        response_format={"type": "json"},
        user_id="u",
        session_id="s",
        cache_key="c",
        metadata={"a": "b"},
        priority=9,
        timeout_ms=60_000,
    )
    params = result.plan.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 10, 0.01)
    assert (params.repetition_penalty, params.max_tokens, params.stop) == (1.2, 3, ("END",))
    assert (result.seed, result.validation_passed) == (11, None)  # the answer was cut


def test_a_stream_gives_chunks_and_then_the_result(client: ExpertClient) -> None:
    stream = client.infer_stream(PROMPT, temperature=0.0, max_tokens=9)
    with pytest.raises(NoAnswerError):
        _ = stream.result
    text = "".join(chunk.text for chunk in stream)
    assert stream.started is not None
    assert stream.started.job_id == stream.result.job_id
    assert stream.result.text == text
    assert stream.result.text == client.infer(PROMPT, temperature=0.0, max_tokens=9).text


def test_leaving_a_stream_early_is_no_error(client: ExpertClient) -> None:
    with client.infer_stream(PROMPT, temperature=0.0, max_tokens=60) as stream:
        next(stream)
    assert list(stream) == []


def test_what_is_wrong_is_an_error_of_ours(client: ExpertClient) -> None:
    with pytest.raises(NotFoundError, match="acme/none is not installed") as missing:
        client.infer(PROMPT, force_experts=["acme/none"])
    assert missing.value.hint
    with pytest.raises(NotFoundError, match="acme/none is not installed"):
        list(client.infer_stream(PROMPT, force_experts=["acme/none"]))
    with pytest.raises(UsageError, match="temperature"):
        client.infer(PROMPT, temperature=3.0)
    with pytest.raises(TimedOutError):
        client.infer(PROMPT, max_tokens=4000, timeout_ms=1)
    with pytest.raises(NotFoundError, match="there is no job"):
        client.jobs.get("f" * 32)


def test_a_key_is_shown(make_served: MakeServed, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served(None)
    secret = served.service.keys.create("ada", now=0.0).secret
    assert make_client(served, api_key=secret).experts()
    with pytest.raises(UnauthenticatedError):
        make_client(served).experts()
    monkeypatch.setenv("EXPERT_API_KEY", secret)
    assert make_client(served).experts()


def test_a_job_is_waited_for(client: ExpertClient) -> None:
    job = client.jobs.submit(PROMPT, temperature=0.0, max_tokens=9, priority=1)
    assert job.status == "queued"
    over = client.jobs.wait(job.job_id)
    assert over.is_over
    assert over.demand_result().text == over.text
    assert over.text == client.infer(PROMPT, temperature=0.0, max_tokens=9).text


def test_waiting_for_a_job_may_take_only_so_long(client: ExpertClient) -> None:
    job = endless(client)
    with pytest.raises(TimedOutError, match="is still"):
        client.jobs.wait(job.job_id, timeout=0.0)
    assert client.jobs.cancel(job.job_id).status == "cancelled"
    client.jobs.wait(job.job_id)


def test_a_job_of_a_block_ends_with_it(client: ExpertClient) -> None:
    with client.jobs.running(PROMPT, temperature=0.0, max_tokens=100_000) as job:
        wait_for_text(client, job)
    over = client.jobs.wait(job.job_id)
    assert over.status == "cancelled"
    assert over.demand_result().finish_reason == "cancelled"


def test_a_job_that_failed_raises_why(client: ExpertClient) -> None:
    job = client.jobs.submit(PROMPT, force_experts=["acme/none"])
    with pytest.raises(NotFoundError, match="acme/none"):
        client.jobs.wait(job.job_id).demand_result()
    with pytest.raises(NoAnswerError, match="is queued"):
        job.demand_result()


def test_a_job_without_an_answer_raises_that_it_was_cancelled(client: ExpertClient) -> None:
    queued = client.jobs.submit(PROMPT, max_tokens=1)
    document = {name: getattr(queued, name) for name in queued.__struct_fields__}
    with pytest.raises(CancelledError):
        Job(**{**document, "status": "cancelled"}).demand_result()
    client.jobs.wait(queued.job_id)


def test_a_route_is_told_with_its_candidates(client: ExpertClient) -> None:
    found = client.route(PROMPT, force_experts=["acme/json:0.5"])
    assert [(e.ref, e.weight) for e in found.plan.experts] == [("acme/json@1.0.0", 0.5)]
    assert any(candidate.chosen for candidate in found.candidates)


def test_experts_and_models_are_listed(client: ExpertClient) -> None:
    assert [expert.name for expert in client.experts()] == sorted(EXPERTS)
    assert all(expert.fits and not expert.revoked for expert in client.experts())
    ids = {model.id for model in client.models()}
    assert {BASE, "auto"} <= ids


def test_the_example_of_the_package_runs(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import expertctl.client as package

    assert package.__doc__
    lines = package.__doc__.split("::\n")[1].split("\n\n`AsyncExpertClient`")[0]
    source = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    monkeypatch.setattr(package, "ExpertClient", lambda: make_client(served))
    exec(compile(source, "example", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"\(.*\) \d+\.\d+$", shown, re.MULTILINE)  # experts and milliseconds
    assert re.search(r"(length|stop)$", shown, re.MULTILINE)
