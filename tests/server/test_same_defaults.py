"""Every API samples alike where its request is silent: as the base's own file says."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.harness import BASE, ServedPackages, ServerHarness, run_app

GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
              "repetition_penalty": 1.05}  # fmt: skip
EXPECTED = {n: v for n, v in GENERATION.items() if n != "do_sample"}
MESSAGES = [{"role": "user", "content": "Hi"}]
HEADERS = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def warm(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHarness]:
    """A server whose base comes with the sampling settings of Qwen2.5."""
    folder = tmp_path_factory.mktemp("warm")
    directory = folder / BASE
    shutil.copytree(stock.base_dir, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **GENERATION}))
    with run_app(replace(stock, base_dir=directory).make_home(folder / "home")) as served:
        yield served


def chat(served: ServerHarness, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 2, **fields}
    return served.client().post("/v1/chat/completions", json=body).json()


def params_by(served: ServerHarness, way: str, **fields: Any) -> dict[str, Any]:
    """The sampling settings of the plan that answered."""
    client, body = served.client(), {"max_tokens": 2, **fields}
    if way.startswith("chat "):
        document = chat(served, way.removeprefix("chat "), **fields)["expertctl"]
    elif way == "infer":
        document = client.post("/v1/infer", json={"prompt": "Hi", **body}).json()
    elif way == "completions":
        body |= {"model": BASE, "prompt": "Hi"}
        document = client.post("/v1/completions", json=body).json()["expertctl"]
    else:
        body |= {"model": BASE, "messages": MESSAGES}
        document = client.post("/v1/messages", json=body, headers=HEADERS).json()["expertctl"]
    params: dict[str, Any] = document["plan"]["params"]
    return params


WAYS = [f"chat {BASE}", "chat auto", "chat acme/sql", "infer", "completions", "messages"]


@pytest.mark.parametrize("way", WAYS)
def test_silence_means_the_settings_of_the_base_whichever_way_a_request_comes_in(
    way: str, warm: ServerHarness
) -> None:
    assert EXPECTED.items() <= params_by(warm, way).items()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_client_says_wins_over_the_base(way: str, warm: ServerHarness) -> None:
    params = params_by(warm, way, temperature=0.25)
    assert (params["temperature"], params["top_p"]) == (0.25, 0.8)


@pytest.mark.parametrize("way", WAYS)
def test_without_settings_of_the_base_ours_count_and_no_repetition_is_penalised(
    way: str, served: ServerHarness
) -> None:
    params = params_by(served, way)
    assert (params["temperature"], params["top_p"]) == (0.6, 0.95)
    assert (params["top_k"], params["repetition_penalty"]) == (0, 1.0)


def test_one_seed_gives_one_answer_whatever_the_model_is_called(warm: ServerHarness) -> None:
    answers = [chat(warm, model, seed=7, max_tokens=12) for model in (BASE, "auto")]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 1
