"""Generating: greedy equals transformers, streams equal wholes, ends where it must."""

import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from expertctl.engine.generation import (
    DEFAULT_STOP_RULES,
    DecoderSession,
    GenerationOutput,
    OutputWriter,
    SequentialModel,
    StopRules,
    step_sequentially,
)
from expertctl.engine.running_batch import TextConsumer, generate_text
from expertctl.engine.running_sequence import RunningSequence
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError
from expertctl.package.model_config import read_model_config
from expertctl.routing.plan import SamplingParams
from tests.factories import decode_bytes, write_base

PROMPT = "Sort: 41, 7, 23"
GREEDY = SamplingParams().to_greedy()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose generation_config names no end token, so that it writes on and on."""
    directory = write_base(tmp_path_factory.mktemp("generate") / "base", seed=3)
    set_end(directory, [])
    return directory


def set_end(directory: Path, ids: list[int]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": None}))


@dataclass(frozen=True)
class TinyModel:
    decoder: Decoder
    tokenizer: Tokenizer

    def stream(
        self,
        *,
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        rules: StopRules = DEFAULT_STOP_RULES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Generator[str, None, GenerationOutput]:
        ids = self.tokenizer.encode(PROMPT)
        cache = KVCache(self.decoder.config, len(ids) + max_tokens)
        writer = OutputWriter(self.tokenizer, params, seed=seed, max_tokens=max_tokens, rules=rules)
        session = DecoderSession(self.decoder, cache, {})
        sequence = RunningSequence(TextConsumer(), session, writer, cache=cache, unread=ids)
        return generate_text(SequentialModel(), sequence, clock=clock)


def open_model(directory: Path) -> TinyModel:
    config = read_model_config(directory)
    return TinyModel(
        Decoder(config, load_base_weights(directory, config)), Tokenizer.open(directory)
    )


@pytest.fixture(scope="module")
def model(base: Path) -> TinyModel:
    return open_model(base)


def run(
    model: TinyModel,
    *,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    max_tokens: int = 24,
    rules: StopRules = DEFAULT_STOP_RULES,
) -> tuple[list[str], GenerationOutput]:
    return drain(model.stream(params=params, seed=seed, max_tokens=max_tokens, rules=rules))


def drain(stream: Generator[str, None, GenerationOutput]) -> tuple[list[str], GenerationOutput]:
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_greedy_tokens_are_those_of_transformers(base: Path, model: TinyModel) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = model.tokenizer.encode(PROMPT)
    expected = oracle.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    _, result = run(model)
    assert list(result.tokens) == expected[0, len(ids) :].tolist()


def test_the_pieces_are_the_text_and_the_text_is_the_tokens(model: TinyModel) -> None:
    pieces, result = run(model)
    assert "".join(pieces) == result.text == decode_bytes(result.tokens)
    assert all(pieces)
    assert len(pieces) > 1


def test_it_ends_with_the_last_token_that_is_allowed(model: TinyModel) -> None:
    for limit in (1, 2, 7):
        _, result = run(model, max_tokens=limit)
        assert len(result.tokens) == limit
        assert result.finish_reason == "length"
        assert result.decode_steps == limit - 1


def test_an_end_token_ends_the_text_and_is_not_in_it(tmp_path: Path, model: TinyModel) -> None:
    _, free = run(model)
    first = next(i for i in range(3, 24) if free.tokens[i] not in free.tokens[:i])
    directory = write_base(tmp_path / "base", seed=3)
    set_end(directory, [free.tokens[first]])
    _, result = run(open_model(directory))
    assert result.finish_reason == "stop"
    assert result.tokens == free.tokens[:first]
    assert result.text == model.tokenizer.decode(free.tokens[:first])


def of_transformers(base: Path, ids: list[int], **options: Any) -> list[int]:
    """The greedy tokens of transformers, without an end token at their end."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole = oracle.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0, **options
    )
    tokens: list[int] = whole[0, len(ids) :].tolist()
    ends = options.get("eos_token_id") or []
    return tokens[:-1] if len(tokens) < 24 and tokens[-1] in ends else tokens


@pytest.mark.parametrize("least", [0, 1, 4, 10, 24])
def test_stop_token_ids_and_min_tokens_give_the_tokens_of_transformers(
    base: Path, model: TinyModel, least: int
) -> None:
    free = run(model)[1].tokens
    end = next(free[i] for i in range(3, 24) if free[i] not in free[:i])
    ids = model.tokenizer.encode(PROMPT)
    expected = of_transformers(base, ids, eos_token_id=[end], min_new_tokens=least)
    rules = StopRules(min_tokens=least, stop_tokens=frozenset({end}))
    _, result = run(model, rules=rules)
    assert list(result.tokens) == expected
    assert result.finish_reason == ("stop" if len(expected) < 24 else "length")


def test_ignore_eos_goes_on_as_transformers_does_without_an_end_token(
    base: Path, tmp_path: Path, model: TinyModel
) -> None:
    free = run(model)[1].tokens
    directory = write_base(tmp_path / "base", seed=3)
    set_end(directory, [free[3]])
    ending = open_model(directory)
    assert run(ending)[1].finish_reason == "stop"
    _, result = run(ending, rules=StopRules(ignore_end=True))
    expected = of_transformers(base, model.tokenizer.encode(PROMPT), eos_token_id=None)
    assert (list(result.tokens), result.finish_reason) == (expected, "length")


def test_a_stop_string_counts_only_after_min_tokens(model: TinyModel) -> None:
    _, free = run(model)
    stop = free.text[0]
    first = run(model, params=with_stop(stop))[1]
    assert (first.text, first.finish_reason) == ("", "stop")
    _, result = run(model, params=with_stop(stop), rules=StopRules(min_tokens=5))
    begin = model.tokenizer.decode(free.tokens[:5])
    rest = free.text[len(begin) :]
    assert result.text == begin + (rest[: rest.index(stop)] if stop in rest else rest)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 0.0), (0.0, 2.0), (-2.0, 0.5), (0.3, -0.2)]
)
def test_greedy_text_with_penalties_follows_openais_formula(
    base: Path, model: TinyModel, presence: float, frequency: float
) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids, expected = model.tokenizer.encode(PROMPT), list[int]()
    for _ in range(12):
        mu = oracle(torch.tensor([ids + expected])).logits[0, -1].detach()
        c = torch.bincount(torch.tensor(expected, dtype=torch.long), minlength=len(mu))
        expected.append(int((mu - c * frequency - (c > 0).float() * presence).argmax()))
    params = replace(GREEDY, presence_penalty=presence, frequency_penalty=frequency)
    assert list(run(model, params=params, max_tokens=12)[1].tokens) == expected


def test_a_stop_string_ends_the_text_before_it(model: TinyModel) -> None:
    _, free = run(model)
    stop = free.text[5:8]
    pieces, result = run(model, params=with_stop(stop))
    assert result.finish_reason == "stop"
    assert "".join(pieces) == result.text == free.text[: free.text.index(stop)]
    assert len(result.tokens) < len(free.tokens)


def test_what_could_have_become_a_stop_string_is_given_out_at_the_end(model: TinyModel) -> None:
    _, free = run(model)
    pieces, result = run(model, params=with_stop(f"{free.text[-2:]}never"))
    assert result.finish_reason == "length"
    assert "".join(pieces) == result.text == free.text


def test_a_stop_string_that_is_complete_with_the_last_token_counts(model: TinyModel) -> None:
    _, free = run(model)
    last = free.text[-1]
    first = free.text.index(last)
    _, result = run(model, params=with_stop(last), max_tokens=24)
    assert (result.finish_reason, result.text) == ("stop", free.text[:first])


def test_one_seed_gives_one_text_and_another_seed_another(model: TinyModel) -> None:
    params = SamplingParams(temperature=1.0, top_p=1.0)
    texts = [run(model, params=params, seed=seed)[1].tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_penalties_see_generated_tokens_only(model: TinyModel) -> None:
    """With a repetition penalty that is large enough no token comes twice before all came once."""
    params = SamplingParams(
        temperature=1e-6, top_p=1.0, presence_penalty=2.0, frequency_penalty=2.0
    )
    _, result = run(model, params=params)
    _, greedy = run(model)
    assert result.tokens[0] == greedy.tokens[0]
    assert result.tokens != greedy.tokens


def test_times_are_counted(model: TinyModel) -> None:
    _, result = run(model)
    assert 0 < result.prefill_ms <= result.first_token_ms
    assert result.tokens_per_s == pytest.approx(23 / result.decode_ms * 1e3)
    assert run(model, max_tokens=1)[1].tokens_per_s == 0.0


def test_the_time_of_the_consumer_is_not_counted(model: TinyModel) -> None:
    clock = GenerationClock()
    stream = model.stream(params=GREEDY, seed=0, max_tokens=5, clock=clock)
    next(stream)
    clock.now += 1000.0
    result = drain(stream)[1]
    assert result.decode_steps == 4
    assert result.decode_ms == pytest.approx(4.0), "by this clock a step takes 1 ms"


class GenerationClock:
    """Time that passes only when it is read, a little, and when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def test_a_text_cancelled_while_its_prompt_is_read_has_no_token(model: TinyModel) -> None:
    answers = iter([True])
    consumer = TextConsumer(lambda: next(answers, False))
    ids = model.tokenizer.encode(PROMPT)
    cache = KVCache(model.decoder.config, len(ids) + 5)
    session = DecoderSession(model.decoder, cache, {}, progress=consumer.check_prefill)
    writer = OutputWriter(model.tokenizer, GREEDY, seed=0, max_tokens=5)
    sequence = RunningSequence(consumer, session, writer, cache=cache, unread=ids)
    pieces, result = drain(generate_text(SequentialModel(), sequence))
    assert (pieces, result.tokens, result.finish_reason) == ([], (), "cancelled")
    assert cache.length == 0, "what was read of it is dropped"


def test_a_text_whose_memory_ends_raises_and_keeps_its_pieces(model: TinyModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    cache = KVCache(model.decoder.config, len(ids) + 2)
    session = DecoderSession(model.decoder, cache, {})
    writer = OutputWriter(model.tokenizer, GREEDY, seed=0, max_tokens=9)
    sequence = RunningSequence(TextConsumer(), session, writer, cache=cache, unread=ids)
    with pytest.raises(BudgetError, match="1 more tokens do not fit"):
        drain(generate_text(SequentialModel(), sequence))
    assert len(writer.tokens) == 3


def with_stop(text: str) -> Any:
    return SamplingParams(stop=(text,)).to_greedy()


def test_no_text_is_ahead_of_another_after_a_step_that_failed(model: TinyModel) -> None:
    ids, config = model.tokenizer.encode(PROMPT), model.decoder.config
    caches = [KVCache(config, len(ids) + more) for more in (1, 0, 1)]
    texts = [DecoderSession(model.decoder, cache, {}) for cache in caches]
    for text in texts:
        text.prefill(ids)
    with pytest.raises(BudgetError, match="1 more tokens do not fit"):
        step_sequentially([(text, 5) for text in texts])
    assert [cache.length for cache in caches] == [len(ids)] * 3
    found = step_sequentially([(texts[0], 5), (texts[2], 5)])
    assert np.array_equal(found[0], found[1])


def logits_of(step: int) -> torch.Tensor:
    """Scores close to each other, so that a penalty decides between many tokens."""
    return torch.randn(200, generator=torch.Generator().manual_seed(step % 3)) * 0.3 + 4


@pytest.mark.parametrize("penalty", [1.0, 1.05, 1.3, 2.0])
def test_an_answer_of_many_tokens_is_penalised_for_its_last_64_as_transformers_would(
    model: TinyModel, penalty: float
) -> None:
    params = SamplingParams(temperature=1.0, top_k=1, top_p=1.0, repetition_penalty=penalty)
    writer = OutputWriter(model.tokenizer, params, seed=0, max_tokens=300)
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected: list[int] = []
    for step in range(200):
        writer.take_logits(logits_of(step).numpy())
        window = torch.tensor([expected[-64:]], dtype=torch.long)
        scores = processor(window, logits_of(step)[None]) if expected else logits_of(step)[None]
        expected.append(int(scores.argmax()))
    assert writer.tokens == expected
    if penalty == 2.0:
        assert len(set(expected[:64])) == 64
        assert set(expected[:100]) & set(expected[100:]), "what fell out of the window comes again"


@pytest.mark.parametrize("end", ["length", "cancelled", "timeout", "stop"])
def test_an_answer_that_is_cut_inside_a_character_ends_before_it(
    model: TinyModel, end: str
) -> None:
    written = [*"Grüße ".encode(), *"🙂".encode()[:3]]
    most = len(written) if end == "length" else 300
    writer = OutputWriter(model.tokenizer, GREEDY, seed=0, max_tokens=most)
    for token in written:
        scores = np.zeros(300, np.float32)
        scores[token] = 9.0
        writer.take_logits(scores)
    if end in {"cancelled", "timeout"}:
        writer.stop(end)  # type: ignore[arg-type]  # one of the two
    elif end == "stop":
        writer._end_ids = frozenset({299})
        scores = np.zeros(300, np.float32)
        scores[299] = 9.0
        writer.take_logits(scores)
    assert writer.finish_reason == end
    assert "".join(writer.pieces) == "Grüße "
    assert writer.tokens == written
