"""What `run` and `chat` ask of a server beyond other clients: conversations, bases, proofs."""

import asyncio
from typing import Any

import pytest

from expertctl.server.settings import ServeSettings
from expertctl.store.server_record import create_nonce, create_secret, derive_key, make_proof
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, PROMPT, ServerHarness, StreamingClient

GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
EARLIER = [{"role": "user", "content": "Sort 9, 8"}, {"role": "assistant", "content": "8, 9"}]


def ask(served: ServerHarness, **body: Any) -> dict[str, Any]:
    answer = served.client().post("/v1/infer", json=GREEDY | body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def refuse(served: ServerHarness, **body: Any) -> tuple[int, str, str]:
    answer = served.client().post("/v1/infer", json=GREEDY | body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_a_conversation_precedes_the_prompt(served: ServerHarness) -> None:
    alone, later = ask(served), ask(served, conversation={"messages": EARLIER})
    assert later["tokens"]["prompt"] > alone["tokens"]["prompt"]
    told = [{"role": "system", "content": "Be brief"}, *EARLIER]
    assert (
        ask(served, conversation={"messages": told})["tokens"]["prompt"]
        > (later["tokens"]["prompt"])
    )


def test_the_experts_of_the_last_answer_stay_for_a_follow_up(served: ServerHarness) -> None:
    first = ask(served, force_experts=["acme/sql"])
    earlier = {"messages": EARLIER, "plan": first["plan"]}
    follow_up = ask(served, prompt="And 7?", conversation=earlier)
    assert follow_up["experts_used"] == first["experts_used"]
    [expert] = follow_up["plan"]["experts"]
    assert expert["reason"] == "kept from the previous turn"
    earlier["plan"] = {"of": "another version"}
    unknown = ask(served, prompt="And 7?", conversation=earlier)
    assert "kept" not in str(unknown["plan"])


@pytest.mark.parametrize(
    "messages",
    [
        EARLIER[:1],
        EARLIER[::-1],
        [*EARLIER, {"role": "system", "content": "late"}, *EARLIER],
        [{"role": "user", "content": " "}, EARLIER[1]],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x", "name": "y"}],
    ],
)
def test_what_is_no_conversation_is_refused(
    served: ServerHarness, messages: list[dict[str, str]]
) -> None:
    status, code, message = refuse(served, conversation={"messages": messages})
    assert (status, code) == (400, "usage")
    assert "conversation" in message


def test_the_base_can_answer_alone(served: ServerHarness) -> None:
    assert ask(served, no_experts=True)["experts_used"] == []
    status, code, _ = refuse(served, no_experts=True, force_experts=["acme/sql"])
    assert (status, code) == (400, "usage")


def test_a_prompt_that_is_too_long_is_cut_where_that_is_asked_for(served: ServerHarness) -> None:
    long = "x " * 9000
    assert refuse(served, prompt=long)[1] == "context_length_exceeded"
    assert any(
        "only" in text or "cut" in text
        for text in ask(served, prompt=long, truncate=True)["warnings"]
    )


def test_another_base_than_the_wanted_one_does_not_answer(served: ServerHarness) -> None:
    assert ask(served, base=BASE)["plan"]["base"] == BASE
    assert ask(served, base="auto")["plan"]["base"] == BASE
    status, code, message = refuse(served, base="other")
    assert (status, code) == (422, "base_mismatch")
    assert message == f"this server serves {BASE}, not other"
    job = served.client().post("/v1/jobs", json=GREEDY | {"base": "other"})
    assert job.status_code == 422


def test_a_base_that_a_run_would_prefer_is_seen(make_served: MakeServed) -> None:
    served = make_served()
    home = served.user_home
    home.bases.add(home.bases.find(BASE).path, name="newer")
    assert refuse(served, base="auto", no_experts=True)[2] == (
        f"this server serves {BASE}, not newer"
    )
    assert ask(served, no_experts=True)["plan"]["base"] == BASE


def test_a_streamed_answer_is_a_job_until_its_end(served: ServerHarness) -> None:
    """`tests/cli/test_remote_process.py` cancels one."""
    with served.client().stream("POST", "/v1/infer", json=GREEDY | {"stream": True}) as answer:
        text = "".join(answer.iter_text())
    job_id = text.partition('"job_id":"')[2][:32]
    assert served.client().delete(f"/v1/jobs/{job_id}").status_code == 404


def test_a_streamed_answer_is_a_running_job(served: ServerHarness) -> None:
    async def listen() -> dict[str, Any]:
        body = GREEDY | {"stream": True, "max_tokens": 200}
        async with StreamingClient(served.app, "/v1/infer", body) as listener:
            assert (await listener.read_head())[0] == 200
            started = (await listener.read_chunk()).decode()
            listener.may_read.clear()
            job_id = started.partition('"job_id":"')[2][:32]
            found = await asyncio.to_thread(served.client().get, f"/v1/jobs/{job_id}")
            job: dict[str, Any] = found.json()
            return job

    job = asyncio.run(listen())
    assert (job["status"], job["ended_at"], job["result"]) == ("processing", None, None)
    assert job["started_at"]


def test_a_server_proves_its_secret_to_anyone_and_takes_the_key_of_its_owner(
    make_served: MakeServed,
) -> None:
    secret, nonce = create_secret(), create_nonce()
    served = make_served(ServeSettings(secret=secret))
    assert secret not in repr(served.service.settings)
    served.service.keys.create("alice", now=0.0)
    answer = served.client().post("/v1/proof", json={"nonce": nonce})
    assert answer.json() == {"proof": make_proof(secret, nonce)}
    for bad in ({}, {"nonce": "x"}, {"nonce": nonce.upper() + "G"}, {"nonce": nonce, "more": 1}):
        assert served.client().post("/v1/proof", json=bad).status_code == 400
    assert served.client().get("/v1/experts").status_code == 401
    assert served.client(secret).get("/v1/experts").status_code == 401
    owner = served.client(derive_key(secret))
    assert owner.get("/v1/experts").status_code == 200
    assert owner.post("/moe", json={"reset": True}).status_code != 403, "the owner manages it"


def test_a_server_without_a_record_proves_nothing(served: ServerHarness) -> None:
    answer = served.client().post("/v1/proof", json={"nonce": create_nonce()})
    assert answer.status_code == 404
