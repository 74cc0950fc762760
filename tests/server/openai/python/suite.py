"""Clients for Python that are in no extra, on a server whose answers are known.

Run by ``test_other_clients.py`` in an environment of its own; ends with an error where an answer is
not what it should be.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import litellm
import openai

URL = os.environ["EXPERT_TEST_URL"]  # with /v1
KEY = os.environ["EXPERT_TEST_KEY"]
HELLO = os.environ["EXPERT_TEST_HELLO"]
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OPENAI: dict[str, Any] = {
    "model": "openai/gpt-4o-mini",
    "api_base": URL,
    "api_key": KEY,
    "temperature": 0,
}
ANTHROPIC: dict[str, Any] = {
    "model": "anthropic/gpt-4o-mini",
    "api_base": URL.removesuffix("/v1"),
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": 64,
}


def litellm_is_answered(provider: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HI, **provider)
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def litellm_reads_a_stream(provider: dict[str, Any]) -> None:
    options = {"include_usage": True}
    stream = litellm.completion(messages=HI, stream=True, stream_options=options, **provider)
    chunks = list(stream)
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == HELLO


def litellm_reads_a_call(provider: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather?"}], tools=[TOOL], **provider
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def refusal(**request: Any) -> openai.APIStatusError:
    try:
        litellm.completion(num_retries=0, **request)
    except openai.APIStatusError as error:  # all of LiteLLM's are such
        return error
    raise AssertionError("the request was answered")


def litellm_knows_why_a_request_is_refused() -> None:
    long = [{"role": "user", "content": "long " * 5000}]
    for provider, words in ((OPENAI, "maximum context length"), (ANTHROPIC, "prompt is too long")):
        error = refusal(messages=long, **provider)
        assert isinstance(error, litellm.ContextWindowExceededError)
        assert words in str(error)
    gone = refusal(messages=HI, **{**OPENAI, "model": "openai/gone"})
    assert isinstance(gone, litellm.NotFoundError)


def llm(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def llm_is_answered() -> None:
    folder = Path(os.environ["LLM_USER_PATH"])
    models = [
        f"- model_id: local\n  model_name: gpt-4o-mini\n  api_base: {URL}\n  api_key_name: local\n"
        "  supports_schema: true\n"
    ]
    (folder / "extra-openai-models.yaml").write_text("".join(models), encoding="utf-8")
    (folder / "keys.json").write_text(json.dumps({"local": KEY}), encoding="utf-8")
    for words in ((), ("--no-stream",)):
        assert llm("-m", "local", "-o", "temperature", "0", *words, "Hi").strip() == HELLO
    piped = llm("-m", "local", "-o", "temperature", "0", "-s", "Be kind.", stdin="Hi")
    assert piped.strip() == HELLO
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": {"sorted": numbers}})
    told = llm("-m", "local", "--schema", schema, "--no-stream", "Sort, as JSON")
    assert json.loads(told) == {"sorted": [1, 2, 3]}


if __name__ == "__main__":
    for provider in (OPENAI, ANTHROPIC):
        litellm_is_answered(provider)
        litellm_reads_a_stream(provider)
        litellm_reads_a_call(provider)
    litellm_knows_why_a_request_is_refused()
    llm_is_answered()
