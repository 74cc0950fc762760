"""Whole runs with ``--engine transformers``: the same promises, one expert, said in warnings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.torch.compat_engine import ESTIMATE, SLOW, TransformersSession
from expertctl.errors import (
    BaseMismatchError,
    BudgetError,
    DigestError,
    IncompatibleError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import Reference
from expertctl.routing.plan import SavedPlan
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert
from expertctl.schema.validation import find_problems
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.compat_models import KINDS, NATIVE, CompatModel, write_model
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.factories import make_route_request
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["engine_packages", "fast", "user_home"]

FAMILIES = ("gpt_neox", "gemma", "gemma3_text", "phi3", "falcon", "starcoder2", "cohere")
TOKENS = 8
PROMPT = "Sort: 3, 1, 2"
SQL = ForcedExpert(Reference.parse("acme/sql"))
GREEDY = SamplingOverrides(greedy=True, max_tokens=TOKENS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompatModel]:
    folder = tmp_path_factory.mktemp("models")
    names = ("gpt2", *FAMILIES, *NATIVE)
    return {arch: write_model(folder, arch, seed=3) for arch in names}


@pytest.fixture(scope="session")
def gpt2(models: dict[str, CompatModel]) -> CompatModel:
    return models["gpt2"]


def engine_of(user_home: HomeFixture, *, budget: int = 32 << 20) -> LocalEngine:
    return LocalEngine(
        Planner.open(Settings(Home(user_home.root), encoder="lexical")), budget=budget
    )


def request(*experts: NamedExpert, prompt: str = PROMPT, **options: Any) -> RunRequest:
    given = {"engine": "transformers", "sampling": GREEDY, "seed": 0, **options.pop("route", {})}
    route = make_route_request(prompt=prompt, **given)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=experts, **options)


def run(engine: LocalEngine, wanted: RunRequest) -> RunResult:
    pieces, stream = [], engine.run(wanted)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            result = end.value
            break
    assert isinstance(result, RunResult)
    assert "".join(pieces) == result.generated.text
    assert find_problems(result.to_json(), "run") == []
    engine.check_integrity()
    return result


def prompt_ids(text: str = PROMPT) -> list[int]:
    """The prompt's tokens, as the byte-level tokenizer and its ChatML template make them."""
    start, end = 257, 258
    return [start, *b"user\n", *text.encode(), end, *b"\n", start, *b"assistant\n"]


def until_end(tokens: list[int]) -> tuple[int, ...]:
    """What of greedy tokens is text: all before one that ends it."""
    kept: list[int] = []
    for token in tokens:
        if token in {256, 258}:
            break
        kept.append(token)
    return tuple(kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "gemma"])
def test_the_tokens_are_those_that_transformers_generates_with_peft(
    arch: str, kind: str, models: dict[str, CompatModel], user_home: HomeFixture, tmp_path: Path
) -> None:
    model = models[arch]
    user_home.bases.add(model.directory)
    user_home.install(model.make_package(kind, tmp_path, key=make_key("acme")))
    engine = engine_of(user_home)
    result = run(engine, request(SQL))
    ids = prompt_ids()
    assert result.prompt_tokens == len(ids)
    assert result.generated.tokens == until_end(model.generate(kind, ids, TOKENS))
    assert result.warnings[:2] == (SLOW, ESTIMATE)


@pytest.mark.parametrize("arch", [*NATIVE, *FAMILIES])
def test_both_engines_give_the_same_tokens_where_both_can_run(
    arch: str, models: dict[str, CompatModel], user_home: HomeFixture, tmp_path: Path
) -> None:
    model = models[arch]
    user_home.bases.add(model.directory)
    engine = engine_of(user_home)
    for kind in ("lora", "dora", "ia3", "p_tuning"):
        path = model.make_package(kind, tmp_path, name=f"acme/{kind.replace('_', '-')}")
        expert = FileExpert(path)
        native = run(engine, request(expert, route={"engine": "native"}))
        compat = run(engine, request(expert))
        assert native.generated.tokens == compat.generated.tokens
        assert native.generated.text == compat.generated.text
        assert native.prompt_tokens == compat.prompt_tokens
        assert SLOW not in native.warnings
        assert native.planned.result.plan.identity != compat.planned.result.plan.identity


def test_the_base_alone_answers_and_sampling_is_our_own(
    gpt2: CompatModel, user_home: HomeFixture
) -> None:
    user_home.bases.add(gpt2.directory)
    engine = engine_of(user_home)
    alone = {"base_alone": True}
    result = run(engine, request(route=alone))
    ids = prompt_ids()
    assert result.generated.tokens == until_end(gpt2.generate(None, ids, TOKENS))
    wishes = SamplingOverrides(temperature=1.5, top_p=1.0, max_tokens=20)
    one, again, other = (
        run(engine, request(route={**alone, "sampling": wishes, "seed": seed})).generated.tokens
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_what_was_borrowed_is_given_back_and_the_cost_was_entered(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    user_home.install(gpt2.make_package("lora", tmp_path, key=make_key("acme")))
    engine = engine_of(user_home)
    result = run(engine, request(SQL))
    held = result.memory.held
    weights = sum(parameter.nbytes for parameter in gpt2.model.parameters())
    assert held["base"] == weights
    assert held["kv"] == 2 * 2 * 32 * 4 * (result.prompt_tokens + TOKENS)
    assert min(held.values()) > 0
    assert sum(held.values()) <= result.memory.peak <= result.memory.budget
    assert [engine.budget.reserved_bytes(p) for p in ("base", "kv", "buffers")] == [0, 0, 0]


def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    user_home.install(gpt2.make_package("lora", tmp_path, key=make_key("acme")))
    peak = run(engine_of(user_home), request(SQL)).memory.peak
    assert run(engine_of(user_home, budget=peak), request(SQL)).generated.tokens
    for budget, what in ((1 << 12, "the base gpt2"), (peak - 1, "acme/sql")):
        small = engine_of(user_home, budget=budget)
        with pytest.raises(BudgetError, match=what) as caught:
            run(small, request(SQL))
        assert "--memory-budget" in caught.value.hint
        small.check_integrity()


def test_two_named_experts_are_refused(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    paths = [gpt2.make_package("lora", tmp_path, name=f"acme/{name}") for name in ("one", "two")]
    user_home.install(*paths, allow_unsigned=True)
    two = [ForcedExpert(Reference.parse(f"acme/{name}")) for name in ("one", "two")]
    with pytest.raises(IncompatibleError, match="2 experts cannot run together") as caught:
        run(engine_of(user_home), request(*two))
    assert "name one" in caught.value.hint


def test_of_several_that_routing_finds_the_best_answers_and_the_rest_is_named(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    for name, priority in (("first", 1), ("second", 0)):
        composition = {"role": name, "composes_with": ["first", "second"]}
        user_home.install(
            gpt2.make_package(
                "lora",
                tmp_path,
                name=f"acme/{name}",
                key=make_key("acme"),
                description="Sorts numbers in ascending order.",
                routing={"keywords": ["sort", "numbers"], "priority": priority},
                composition=composition,
            )
        )
    wanted = request(prompt="Sort these numbers in ascending order: 3, 1, 2")
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    assert len(planner.plan(wanted.route).experts) == 2
    result = run(engine_of(user_home), wanted)
    assert [expert.ref for expert in result.planned.experts] == ["acme/first@1.0.0"]
    assert "acme/second@1.0.0 was left out: --engine transformers runs one expert" in (
        result.warnings
    )


def test_a_plan_is_repeated_under_its_own_engine_and_refused_under_the_other(
    models: dict[str, CompatModel], user_home: HomeFixture, tmp_path: Path
) -> None:
    model = models["qwen3"]
    user_home.bases.add(model.directory)
    user_home.install(model.make_package("lora", tmp_path, key=make_key("acme")))
    engine = engine_of(user_home)
    for name, other in (("native", "transformers"), ("transformers", "native")):
        first = run(engine, request(SQL, route={"engine": name}))
        saved = SavedPlan(first.planned.result.plan)
        again = run(engine, request(saved=saved, route={"engine": name}))
        assert again.generated.tokens == first.generated.tokens
        with pytest.raises(IncompatibleError, match="engine") as caught:
            run(engine, request(saved=saved, route={"engine": other}))
        assert "--engine" in caught.value.hint


def test_a_foreign_base_is_refused_by_the_engine_of_our_own(
    gpt2: CompatModel, user_home: HomeFixture
) -> None:
    user_home.bases.add(gpt2.directory)
    with pytest.raises(IncompatibleError, match="does not run the base gpt2") as caught:
        run(engine_of(user_home), request(route={"engine": "native", "base_alone": True}))
    assert "--engine transformers" in caught.value.hint


def test_an_unsigned_file_is_used_with_a_warning_and_a_strangers_is_refused(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    engine = engine_of(user_home)
    unsigned = gpt2.make_package("lora", tmp_path / "a")
    result = run(engine, request(FileExpert(unsigned)))
    assert any("unsigned" in warning for warning in result.warnings)
    signed = gpt2.make_package("lora", tmp_path / "b", key=make_key("stranger"))
    with pytest.raises(TrustError):
        run(engine, request(FileExpert(signed)))
    engine.check_integrity()


def test_a_revoked_key_is_refused(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    user_home.install(gpt2.make_package("lora", tmp_path, key=make_key("acme")))
    user_home.trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        run(engine_of(user_home), request(SQL))


def test_weights_changed_in_the_store_are_refused_before_the_base_is_loaded(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_home.bases.add(gpt2.directory)
    [installed] = user_home.install(gpt2.make_package("lora", tmp_path, key=make_key("acme")))
    blob = user_home.store.blob_path(installed.expert.find_file("adapter_model.safetensors").digest)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)

    def loaded(_: object) -> None:
        raise AssertionError("the base was loaded")

    monkeypatch.setattr("expertctl.engine.torch.compat_engine.load_model", loaded)
    with pytest.raises(DigestError, match=r"acme/sql@1\.0\.0"):
        run(engine_of(user_home), request(SQL))


def test_a_base_changed_on_disk_is_refused(user_home: HomeFixture, tmp_path: Path) -> None:
    model = write_model(tmp_path, "gpt2")
    user_home.bases.add(model.directory)
    weights = model.directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for verify in (False, True):
        with pytest.raises(BaseMismatchError, match=r"model\.safetensors"):
            run(engine_of(user_home), request(verify_base=verify, route={"base_alone": True}))


def test_an_expert_for_another_base_is_refused(
    gpt2: CompatModel, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.bases.add(gpt2.directory)
    user_home.install(engine_packages.package())
    with pytest.raises(BaseMismatchError):
        run(engine_of(user_home), request(SQL, base="gpt2"))
    allowed = request(SQL, base="gpt2", route={"allow_base_mismatch": True})
    with pytest.raises(IncompatibleError, match="does not fit the base"):
        run(engine_of(user_home), allowed)


def test_a_prompt_beyond_the_context_is_refused(gpt2: CompatModel, user_home: HomeFixture) -> None:
    user_home.bases.add(gpt2.directory)
    with pytest.raises(UsageError, match="the context of the base is 96"):
        run(engine_of(user_home), request(prompt="x" * 100, route={"base_alone": True}))


def test_virtual_tokens_count_against_the_context(
    gpt2: CompatModel, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(gpt2.directory)
    package = gpt2.make_package("prompt_tuning", tmp_path)
    engine = engine_of(user_home)
    fitting = "x" * (96 - 5 - 1 - len(prompt_ids("")))
    result = run(engine, request(FileExpert(package), prompt=fitting))
    assert result.prompt_tokens == 96 - 5 - 1
    assert len(result.generated.tokens) <= 1
    with pytest.raises(UsageError, match="5 virtual tokens"):
        run(engine, request(FileExpert(package), prompt=fitting + "x"))


@pytest.mark.parametrize("way", ["fewer", "queue"])
def test_other_ways_with_a_budget_are_refused(
    way: str, gpt2: CompatModel, user_home: HomeFixture
) -> None:
    user_home.bases.add(gpt2.directory)
    with pytest.raises(UsageError, match=way):
        run(engine_of(user_home), request(on_budget=way))


def test_a_token_that_the_base_does_not_have_is_refused(gpt2: CompatModel) -> None:
    reading = TransformersSession(gpt2.model)
    for ids in ([0, 259], [-1]):
        with pytest.raises(IncompatibleError, match="is outside the vocabulary of the base, 259"):
            reading.prefill(ids)
    with pytest.raises(UsageError, match="no token"):
        reading.prefill([])


def test_an_error_of_the_model_is_told_in_words(gpt2: CompatModel) -> None:
    reading = TransformersSession(gpt2.model)
    with pytest.raises(IncompatibleError, match="transformers cannot run gpt2: "):
        reading.prefill([1] * 97)  # there are 96 positions


def test_a_model_that_keeps_nothing_of_what_it_read_is_refused(gpt2: CompatModel) -> None:
    class Forgetful(torch.nn.Module):
        config = gpt2.model.config

        def get_input_embeddings(self) -> Any:
            return gpt2.model.get_input_embeddings()

        def forward(self, **inputs: Any) -> Any:
            output = gpt2.model(**inputs)
            output.past_key_values = None
            return output

    with pytest.raises(IncompatibleError, match="has no KV cache"):
        TransformersSession(Forgetful()).prefill([1, 2])
