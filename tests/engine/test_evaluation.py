"""Evaluation, on data whose right answers transformers and PEFT gave: the shares are known."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine import evaluation
from expertctl.engine.evaluation import EvaluationRequest, evaluate, evaluate_build
from expertctl.engine.evaluation_result import EvaluationResult
from expertctl.engine.request import FileExpert
from expertctl.errors import (
    BaseMismatchError,
    DigestError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
)
from expertctl.package.build import plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.evaluation import EvaluationData, Metric, read_evaluation_data
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert
from expertctl.settings import Home, Settings
from expertctl.store.catalogue import Catalogue
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.factories import decode_bytes, make_package, write_base
from tests.store.fixtures import HomeFixture, make_key, user_home

__all__ = ["engine_packages", "user_home"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.all,
]
"""The oracle is made by whichever test comes first in a process."""

PROMPTS = tuple(f"{a} + {b}" for a, b in zip("12345678", "87654321", strict=True))
LIMIT = 6
ONE, TWO = (ForcedExpert(Reference.parse(f"acme/{name}")) for name in ("one", "two"))
HALF_TWO = ForcedExpert(TWO.target, 0.5)


@dataclass(frozen=True)
class ReferenceAnswers:
    """What transformers and PEFT answer to each prompt, greedily."""

    base: Mapping[str, str]
    one: Mapping[str, str]
    two: Mapping[str, str]
    chain: Mapping[str, str]
    """One, then two at half its weight."""


@dataclass(frozen=True)
class Pair:
    """Two packages on one base, and what they answer."""

    files: Mapping[str, Path]
    answers: ReferenceAnswers


@pytest.fixture(scope="module")
def pair(engine_packages: EnginePackages) -> Pair:
    folder = engine_packages.folder / "pair"
    files = {
        name: make_package(
            folder,
            f"acme/{name}",
            base_dir=engine_packages.base_dir,
            base=engine_packages.base,
            key=make_key("acme"),
            lora={"seed": seed, "scale": 0.4},
            decoding={"max_tokens": LIMIT},
        )
        for name, seed in (("one", 5), ("two", 6))
    }
    return Pair(files, answered(engine_packages.base_dir, folder))


def answered(base: Path, folder: Path) -> ReferenceAnswers:
    import peft
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    alone = greedy(model, tokenizer)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder / "acme-one-1.0.0.files"))
    adapted.load_adapter(str(folder / "acme-two-1.0.0.files"), "two")
    adapted.add_weighted_adapter(["default", "two"], [1.0, 0.5], "chain", combination_type="cat")
    texts = []
    for name in ("default", "two", "chain"):
        adapted.set_adapter(name)
        texts.append(greedy(adapted, tokenizer))
    return ReferenceAnswers(alone, *texts)


def greedy(model: Any, tokenizer: Any) -> dict[str, str]:
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        output = model.generate(input_ids=ids, max_new_tokens=LIMIT, do_sample=False)
        new = output[0, ids.shape[1] :].tolist()
        texts[prompt] = decode_bytes(new)
    return texts


@pytest.fixture
def planner(user_home: HomeFixture, engine_packages: EnginePackages, pair: Pair) -> Planner:
    user_home.bases.add(engine_packages.base_dir)
    user_home.install(*pair.files.values())
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


Written = Callable[..., EvaluationData]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write data: the answers in the order of the prompts."""

    def write(answers: Sequence[str], metric: Metric = "exact_match") -> EvaluationData:
        path = tmp_path / "sums.jsonl"
        rows = [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, answers, strict=False)]
        path.write_text("\n".join(map(json.dumps, rows)))
        return read_evaluation_data(path, metric=metric)

    return write


def mixed(first: Mapping[str, str], second: Mapping[str, str], *, at: int) -> list[str]:
    """The answers of one up to some prompt, then those of another."""
    return [first[p] if i < at else second[p] for i, p in enumerate(PROMPTS)]


def shares(found: EvaluationResult) -> dict[str, float]:
    return {score.name: score.share for score in found.scores}


def test_the_oracle_tells_all_ways_of_answering_apart(pair: Pair) -> None:
    answers = pair.answers
    for prompt in PROMPTS:
        ways = (answers.base, answers.one, answers.two, answers.chain)
        assert len({way[prompt].rstrip() for way in ways}) == 4


def test_the_shares_are_those_that_the_data_was_made_for(
    planner: Planner, pair: Pair, written: Written
) -> None:
    data = written(mixed(pair.answers.one, pair.answers.base, at=6))
    counted: list[int] = []
    request = EvaluationRequest(data=data, expert=ONE)
    found = evaluate(planner, request, progress=counted.append)
    assert shares(found) == {"base": 0.25, "acme/one@1.0.0": 0.75}
    assert [answer.sample.line for answer in found.expert.wrong_answers] == [7, 8]
    assert [answer.text for answer in found.expert.answers] == list(pair.answers.one.values())
    assert [answer.text for answer in found.base.answers] == list(pair.answers.base.values())
    (gain,) = found.gains
    assert (gain.value, gain.gained, gain.lost) == (0.5, 6, 2)
    assert gain.p_value == pytest.approx(2 * (1 + 8 + 28) / 2**8)
    assert [count for count in counted if count] == [1] * request.answers == [1] * 16
    assert (found.max_tokens, found.base_name, found.warnings) == (LIMIT, "market-base", ())
    assert found.expert.truncated_count == 8


def test_a_chain_is_measured_beside_each_of_its_experts(
    planner: Planner, pair: Pair, written: Written
) -> None:
    answers = mixed(pair.answers.chain, pair.answers.two, at=5)
    answers[7] = pair.answers.one[PROMPTS[7]]
    request = EvaluationRequest(data=written(answers), expert=ONE, compose=(HALF_TWO,))
    found = evaluate(planner, request)
    assert shares(found) == {
        "base": 0.0,
        "acme/one@1.0.0": 1 / 8,
        "acme/two@1.0.0": 2 / 8,
        "acme/one@1.0.0 + acme/two@1.0.0:0.5": 5 / 8,
    }
    over_base, over_best = found.gains
    assert (over_base.score, over_base.over) == (found.expert, found.base)
    assert (over_best.score, over_best.over) == (found.chain, found.others[0])
    assert (over_best.value, over_best.gained, over_best.lost) == (3 / 8, 5, 2)
    assert request.answers == 4 * 8


def test_a_file_that_nobody_signed_is_measured_without_being_installed(
    planner: Planner, pair: Pair, written: Written, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    file = make_package(
        tmp_path,
        "local/new",
        base_dir=engine_packages.base_dir,
        base=engine_packages.base,
        lora={"seed": 5, "scale": 0.4},
    )
    data = written(mixed(pair.answers.one, pair.answers.base, at=6))
    request = EvaluationRequest(data=data, expert=FileExpert(file), max_tokens=LIMIT)
    found = evaluate(planner, request)
    assert shares(found) == {"base": 0.25, "local/new@1.0.0": 0.75}
    assert found.warnings == ("local/new@1.0.0 is unsigned, so its publisher is unknown",)


def test_the_stops_of_the_expert_count_for_the_base_too(
    planner: Planner, pair: Pair, written: Written, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    prompt = PROMPTS[0]
    letters = [text[prompt][1] for text in (pair.answers.base, pair.answers.one)]
    file = make_package(
        tmp_path,
        "local/new",
        base_dir=engine_packages.base_dir,
        base=engine_packages.base,
        lora={"seed": 5, "scale": 0.4},
        decoding={"stop": letters, "temperature": 1.5, "repetition_penalty": 1.3},
    )
    request = EvaluationRequest(data=written(["x"]), expert=FileExpert(file))
    found = evaluate(planner, request)
    for score, whole in ((found.base, pair.answers.base), (found.expert, pair.answers.one)):
        (answer,) = score.answers
        assert whole[prompt].startswith(answer.text)
        assert len(answer.text) <= 1
        assert not answer.is_cut
    assert found.max_tokens == evaluation.DEFAULT_MAX_TOKENS


def test_other_metrics_judge_the_same_answers(
    planner: Planner, pair: Pair, written: Written
) -> None:
    parts = [pair.answers.one[p][1:4] if i < 6 else "never" for i, p in enumerate(PROMPTS)]
    found = evaluate(planner, EvaluationRequest(data=written(parts, "contains"), expert=ONE))
    assert found.expert.right_count == 6
    found = evaluate(planner, EvaluationRequest(data=written(["7"], "json"), expert=ONE))
    assert found.expert.right_count == 0


def test_being_evaluated_is_not_being_used(
    planner: Planner, user_home: HomeFixture, written: Written
) -> None:
    evaluate(planner, EvaluationRequest(data=written(["x"]), expert=ONE))
    (stored, _) = user_home.store.list_experts()
    assert user_home.catalogue.history.read_usage_counts().get(stored.content_digest) is None


def test_a_gain_of_two_experts_is_remembered_where_it_is_sure(
    planner: Planner, user_home: HomeFixture, written: Written
) -> None:
    asked = EvaluationRequest(data=written(["x"] * len(PROMPTS)), expert=ONE, compose=(TWO,))
    first = evaluate(planner, asked)
    assert user_home.catalogue.find_sure_gains() == {}
    assert first.chain is not None
    together = [answer.text for answer in first.chain.answers]
    before = user_home.catalogue.read_revision()
    found = evaluate(planner, replace(asked, data=written(together)))
    assert found.gains[-1].value == 1.0
    one, two = (user_home.store.find(e.target).content_digest for e in (ONE, TWO))
    assert user_home.catalogue.find_sure_gains(base="market-base") == {(one, two): 1.0}
    assert user_home.catalogue.read_revision() > before
    (gain,) = user_home.catalogue.history.list_gains()
    assert (gain.n, gain.base, gain.is_significant) == (len(PROMPTS), "market-base", True)
    assert gain.p == pytest.approx(2 / 2**8)


def test_a_gain_at_another_weight_or_without_a_place_to_write_is_not_remembered(
    planner: Planner, user_home: HomeFixture, written: Written
) -> None:
    asked = EvaluationRequest(data=written(["x"]), expert=ONE, compose=(HALF_TWO,))
    assert evaluate(planner, asked).warnings == ()
    assert not user_home.catalogue.history.list_gains()
    nowhere = replace(planner, catalogue=Catalogue(Path("/proc/nowhere/index.db")))
    [warning] = evaluate(nowhere, replace(asked, compose=(TWO,))).warnings
    assert warning.startswith("the gain was not saved for routing: /proc/nowhere/index.db")


def test_a_prompt_that_does_not_fit_is_refused_before_any_other_is_answered(
    planner: Planner, tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "x" * size, "answer": "y"} for size in (3, 2000, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data, counted = read_evaluation_data(path, metric="exact_match"), list[int]()
    with pytest.raises(UsageError, match=r"long\.jsonl, line 2: the prompt has"):
        evaluate(planner, EvaluationRequest(data=data, expert=ONE), progress=counted.append)
    assert counted == []


def test_what_cannot_be_evaluated_is_refused_by_name(
    planner: Planner, written: Written, tmp_path: Path
) -> None:
    data = written(["x"])
    with pytest.raises(UsageError, match=r"at weight 1, not 0\.5"):
        evaluate(planner, EvaluationRequest(data=data, expert=HALF_TWO))
    nobody = ForcedExpert(Reference.parse("acme/nobody"))
    with pytest.raises(NotFoundError, match="acme/nobody"):
        evaluate(planner, EvaluationRequest(data=data, expert=nobody))
    with pytest.raises(NotFoundError, match="acme/nobody"):
        evaluate(planner, EvaluationRequest(data=data, expert=ONE, compose=(nobody,)))
    broken = tmp_path / "broken.expert"
    broken.write_bytes(b"no package")
    with pytest.raises(InvalidPackageError):
        evaluate(planner, EvaluationRequest(data=data, expert=FileExpert(broken)))


def test_a_file_that_changes_meanwhile_is_noticed(
    planner: Planner, pair: Pair, written: Written, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    first, second = (
        make_package(
            tmp_path / str(seed),
            "local/new",
            base_dir=engine_packages.base_dir,
            base=engine_packages.base,
            lora={"seed": seed},
            decoding={"max_tokens": 1},
        )
        for seed in (1, 2)
    )

    def change(_: int) -> None:
        first.write_bytes(second.read_bytes())

    request = EvaluationRequest(data=written(["x", "y"]), expert=FileExpert(first))
    with pytest.raises(DigestError, match="changed while it was evaluated"):
        evaluate(planner, request, progress=change)


def test_a_planned_build_is_evaluated_and_nothing_stays(
    planner: Planner, pair: Pair, written: Written, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    directory = engine_packages.folder / "pair" / "acme-one-1.0.0.files"
    plan = plan_build(directory, ManifestOverrides(), base=engine_packages.base)
    data = written(mixed(pair.answers.one, pair.answers.base, at=6))
    out = tmp_path / "out"
    out.mkdir()
    found = evaluate_build(planner, plan, data, sibling=out / "one.expert")
    assert shares(found) == {"base": 0.25, "acme/one@1.0.0": 0.75}
    assert list(out.iterdir()) == []

    def interrupt(_: int) -> None:
        assert [path.suffix for path in out.glob("*/*")] == [".expert"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_build(planner, plan, data, sibling=out / "one.expert", progress=interrupt)
    assert list(out.iterdir()) == []
    with pytest.raises(NotFoundError, match="no such directory"):
        evaluate_build(planner, plan, data, sibling=tmp_path / "nowhere" / "one.expert")


@pytest.mark.usefixtures("pair")  # writes the directory
def test_a_build_for_a_base_that_was_not_added_is_refused(
    user_home: HomeFixture, written: Written, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    directory = engine_packages.folder / "pair" / "acme-one-1.0.0.files"
    plan = plan_build(directory, ManifestOverrides(), base=engine_packages.base)
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    with pytest.raises(NotFoundError, match="no base model is known"):
        evaluate_build(planner, plan, written(["x"]), sibling=tmp_path / "one.expert")
    user_home.bases.add(write_base(tmp_path / "other", layers=1))
    with pytest.raises(BaseMismatchError, match="was made for"):
        evaluate_build(planner, plan, written(["x"]), sibling=tmp_path / "one.expert")
