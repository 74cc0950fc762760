"""Log-probabilities of prompts, as evaluation harnesses ask for them, against transformers."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from expertctl.server.openai.completion_request import MAX_PROMPT_LOGPROBS
from tests.factories import BYTE_TOKENS
from tests.server.harness import ServedPackages, ServerHarness
from tests.server.openai.client import make_client

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TEXT = "SELECT name FROM users; -- ünï 🙂"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Oracle:
    """The served base as transformers runs it."""

    model: Any
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """The log-softmax after each token, [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def scores(self, ids: list[int]) -> list[float | None]:
        """The log-probability of each token; None for the first."""
        rows = self.logprobs(ids)
        return [None, *(float(rows[n - 1][ids[n]]) for n in range(1, len(ids)))]


def load(directory: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def oracle(stock: ServedPackages) -> Oracle:
    tokenizer = transformers.AutoTokenizer.from_pretrained(stock.base_dir)
    return Oracle(load(stock.base_dir), tokenizer)


@pytest.fixture(scope="module")
def http(served: ServerHarness) -> Iterator[Any]:
    yield served.client()
    gc.collect()


def complete(http: Any, prompt: Any, **fields: Any) -> dict[str, Any]:
    """Ask as lm-eval does, unless fields say otherwise."""
    usual = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = http.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompt, **usual, **fields}
    )
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def refused(http: Any, prompt: Any, **fields: Any) -> tuple[int, str]:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})
    return answer.status_code, answer.json()["error"]["message"]


def assert_scores(told: list[float | None], expected: list[float | None]) -> None:
    assert told[0] is None is expected[0]
    assert told[1:] == pytest.approx(expected[1:], abs=TOLERANCE)


@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
def test_a_harness_reads_the_log_likelihood_of_a_prompt(
    http: Any, oracle: Oracle, as_tokens: bool
) -> None:
    ids = oracle.ids(TEXT)
    [choice] = complete(http, ids if as_tokens else TEXT)["choices"]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(ids) + 1
    assert_scores(scores["token_logprobs"][:-1], oracle.scores(ids))
    written = int(oracle.logprobs(ids)[-1].argmax())
    assert scores["token_logprobs"][-1] == pytest.approx(
        float(oracle.logprobs(ids)[-1][written]), abs=TOLERANCE
    )


def test_nothing_is_written_with_max_tokens_0(http: Any, oracle: Oracle) -> None:
    answer = complete(http, TEXT, max_tokens=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    ids = oracle.ids(TEXT)
    assert_scores(choice["logprobs"]["token_logprobs"], oracle.scores(ids))
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["expertctl"]["warnings"] == []


def test_a_prompt_can_be_read_without_an_answer_and_without_echo(http: Any) -> None:
    [choice] = complete(http, TEXT, max_tokens=0, echo=False)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["tokens"] == []


def test_the_likeliest_tokens_stand_beside_each_token(http: Any, oracle: Oracle) -> None:
    [choice] = complete(http, "abc", max_tokens=0, logprobs=5)["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "c"]
    assert scores["top_logprobs"][0] is None
    rows = oracle.logprobs(oracle.ids("abc"))
    for place in (1, 2):
        top = scores["top_logprobs"][place]
        assert top[scores["tokens"][place]] == scores["token_logprobs"][place]
        best = sorted(top.values(), reverse=True)[:5]
        assert best == pytest.approx(rows[place - 1].topk(5).values.tolist(), abs=TOLERANCE)


def test_a_harness_can_tell_whether_a_token_was_the_likeliest(http: Any, oracle: Oracle) -> None:
    """As lm-eval's `parse_logprobs` does it."""
    ids = oracle.ids("ab")
    ids.append(int(oracle.logprobs(ids)[-1].argmax()))
    ids.append((int(oracle.logprobs(ids)[-1].argmax()) + 1) % BYTE_TOKENS)
    scores = complete(http, ids)["choices"][0]["logprobs"]
    greedy = [
        max(top, key=top.get) == token
        for token, top in zip(scores["tokens"][2:], scores["top_logprobs"][2:], strict=True)
    ]
    assert greedy == [True, False, True]


def test_several_prompts_of_tokens_have_their_scores_in_order(http: Any, oracle: Oracle) -> None:
    prompts = [oracle.ids(text) for text in ("one", "another one", "a")]
    choices = complete(http, prompts)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for ids, choice in zip(prompts, choices, strict=True):
        assert_scores(choice["logprobs"]["token_logprobs"][:-1], oracle.scores(ids))


def test_what_was_kept_of_an_earlier_request_loses_no_score(http: Any, oracle: Oracle) -> None:
    text, kept = "the same beginning of a text, again and again", {"cache_key": "mine"}
    complete(http, text, echo=False, logprobs=None, max_tokens=4, **kept)
    again = complete(http, text, echo=False, logprobs=None, max_tokens=4, **kept)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    scored = complete(http, text, max_tokens=0, **kept)
    assert_scores(
        scored["choices"][0]["logprobs"]["token_logprobs"], oracle.scores(oracle.ids(text))
    )
    later = complete(http, text, echo=False, logprobs=None, max_tokens=4, **kept)
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_two_answers_to_one_prompt_both_begin_with_its_scores(http: Any, oracle: Oracle) -> None:
    choices = complete(http, "ab cd", n=2, temperature=1.0, max_tokens=3)["choices"]
    expected = oracle.scores(oracle.ids("ab cd"))
    for choice in choices:
        scores = choice["logprobs"]
        assert_scores(scores["token_logprobs"][:5], expected)
        assert len(scores["tokens"]) == len(scores["text_offset"]) == 8


def test_an_expert_changes_the_scores_as_peft_does(
    http: Any, oracle: Oracle, stock: ServedPackages
) -> None:
    folder = stock.packages["acme/sql"].with_suffix(".files")
    adapted: Any = peft.PeftModel.from_pretrained(load(stock.base_dir), str(folder))
    ids = oracle.ids(TEXT)
    expected = Oracle(adapted.eval(), oracle.tokenizer).scores(ids)
    assert expected[1:] != pytest.approx(oracle.scores(ids)[1:], abs=0.01)
    [choice] = complete(http, ids, model="acme/sql", max_tokens=0)["choices"]
    assert_scores(choice["logprobs"]["token_logprobs"], expected)


def test_an_offset_is_where_a_token_begins_in_the_text(http: Any) -> None:
    [choice] = complete(http, TEXT, max_tokens=0)["choices"]
    scores = choice["logprobs"]
    at = {
        offset: token for offset, token in zip(scores["text_offset"], scores["tokens"], strict=True)
    }
    for offset, token in at.items():
        assert token.startswith("bytes:") or choice["text"][offset] == token
    assert scores["text_offset"][-4:] == [len(TEXT) - 1] * 4  # the bytes of one letter
    assert scores["tokens"][-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]


def test_control_tokens_are_spelled_in_the_text_and_in_its_tokens(
    http: Any, oracle: Oracle
) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    ids = oracle.ids(text)
    for prompt in (text, ids):
        [choice] = complete(http, prompt, max_tokens=0)["choices"]
        scores = choice["logprobs"]
        assert choice["text"] == text
        assert (scores["tokens"][0], scores["tokens"][-1]) == ("<|im_start|>", "<|im_end|>")
        assert (scores["text_offset"][1], scores["text_offset"][-1]) == (12, 19)
        assert_scores(scores["token_logprobs"], oracle.scores(ids))


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 0}, {"logprobs": 0}], ids=str)
def test_a_stream_begins_with_the_scores_of_its_prompt(
    http: Any, served: ServerHarness, fields: dict[str, Any]
) -> None:
    asked = {"prompt": ["ab", "cd e"], "max_tokens": 3, **fields}
    prompt = asked.pop("prompt")
    at_once = complete(http, prompt, **asked)
    usual = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    with make_client(served) as client:
        chunks = list(
            client.completions.create(
                model="tiny", prompt=prompt, stream=True, **{**usual, **asked}
            )
        )
    for choice in at_once["choices"]:
        mine = [c for one in chunks for c in one.choices if c.index == choice["index"]]
        assert "".join(c.text for c in mine) == choice["text"]
        scored = [c.logprobs for c in mine if c.logprobs is not None]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [value for one in scored for value in getattr(one, column)]
            assert told == choice["logprobs"][column]


def test_a_prompt_may_fill_the_context_if_nothing_is_written(
    http: Any, served: ServerHarness
) -> None:
    ids = [1 + n % 200 for n in range(served.engine.context)]
    [choice] = complete(http, ids, max_tokens=0, logprobs=0)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    status, said = refused(http, ids, max_tokens=1)
    assert status == 400
    assert "4096" in said
    status, _ = refused(http, [*ids, 1], max_tokens=0)
    assert status == 400


def test_a_prompt_may_be_a_single_token(http: Any) -> None:
    [choice] = complete(http, [65], max_tokens=0)["choices"]
    scores = choice["logprobs"]
    assert (scores["tokens"], scores["token_logprobs"]) == (["A"], [None])


def test_a_prompt_of_control_tokens_alone_is_continued(http: Any, oracle: Oracle) -> None:
    ids = [BYTE_TOKENS]
    best = int(oracle.logprobs(ids)[-1].argmax())
    [choice] = complete(http, ids, model="auto", echo=False)["choices"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        [float(oracle.logprobs(ids)[-1][best])], abs=TOLERANCE
    )


def test_more_scores_than_an_answer_may_have_are_refused(http: Any) -> None:
    prompts = [[1] * (MAX_PROMPT_LOGPROBS // 6 // 64)] * 65
    status, said = refused(http, prompts, logprobs=5, echo=True, max_tokens=0)
    assert status == 400
    assert str(MAX_PROMPT_LOGPROBS) in said


def test_tokens_that_the_base_does_not_have_are_refused(http: Any) -> None:
    status, said = refused(http, [1, BYTE_TOKENS + 3])
    assert status == 400
    assert f"no token {BYTE_TOKENS + 3}" in said


LETTERS = "a — 日本 🙂🙂 ünï ok"
CUT = "🙂".encode()[:2]


@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
def test_the_bytes_of_a_letter_begin_where_it_does_and_no_later_token_is_moved(
    http: Any, oracle: Oracle, as_tokens: bool
) -> None:
    ids = oracle.ids(LETTERS)
    [choice] = complete(http, ids if as_tokens else LETTERS, max_tokens=0)["choices"]
    begun = [oracle.tokenizer.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids))]
    assert choice["text"] == LETTERS
    assert choice["logprobs"]["text_offset"] == [len(text) for text in begun]


def test_a_letter_that_a_control_token_cuts_moves_no_later_token(http: Any, oracle: Oracle) -> None:
    [mark] = oracle.ids("<|im_start|>")
    [choice] = complete(http, [*b"a", *CUT, mark, *b"bc"], max_tokens=0)["choices"]
    shown, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert shown == oracle.tokenizer.decode([*b"a", *CUT, mark, *b"bc"])
    assert [shown[place] for place in offsets[-2:]] == ["b", "c"]
    assert offsets[:3] == [0, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_the_offsets_of_an_answer_are_those_of_its_text(
    http: Any, served: ServerHarness, oracle: Oracle, stream: bool, echo: bool
) -> None:
    """The random base writes parts of letters, which may stay broken."""
    asked: dict[str, Any] = {"temperature": 1.5, "max_tokens": 60, "logprobs": 0, "echo": echo}
    with make_client(served) as client:
        if stream:
            chunks = client.completions.create(
                model="tiny", prompt="ab 🙂", stream=True, seed=3, **asked
            )
            choices = [choice for chunk in chunks for choice in chunk.choices]
        else:
            choices = client.completions.create(
                model="tiny", prompt="ab 🙂", seed=3, **asked
            ).choices
    text = "".join(choice.text for choice in choices)
    told = [one.logprobs for one in choices if one.logprobs is not None]
    tokens = [token for one in told for token in one.tokens or []]
    offsets = [offset for one in told for offset in one.text_offset or []]
    assert offsets == sorted(offsets)
    assert len(tokens) == len(offsets)
    broken = sum(token.startswith("bytes:") for token in tokens)
    assert 0 < broken < len(tokens)
    for place, token in zip(offsets, tokens, strict=True):
        if len(token) == 1 and token in text:
            assert text[place] == token or text[place] == "\ufffd"


def test_prompts_of_tokens_are_decoded_beside_the_event_loop(
    http: Any, served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt of 200,000 tokens that takes a tenth of a second, in which nobody is answered."""
    in_loop = list[bool]()
    for name in ("decode", "decode_raw"):
        real = getattr(type(served.engine.tokenizer), name)

        def decode(self: Any, ids: Any, real: Any = real) -> str:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                in_loop.append(len(list(ids)) > 100)
            return str(real(self, ids))

        monkeypatch.setattr(type(served.engine.tokenizer), name, decode)
    ids = [1 + n % 200 for n in range(500)]
    for fields in ({"echo": False, "logprobs": None}, {"logprobs": None}, {}):
        complete(http, ids, **fields)
        complete(http, [ids, ids], **fields)
    assert not any(in_loop)
