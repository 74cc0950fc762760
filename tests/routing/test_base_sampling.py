"""What a base's generation_config.json says of sampling; transformers reads the same files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from expertctl.errors import BaseMismatchError, InvalidPackageError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import (
    PRESETS,
    ForcedExpert,
    RouteRequest,
    read_base_sampling,
    resolve_sampling,
)
from expertctl.schema.manifest import Decoding, Manifest, Routing
from expertctl.settings import Home, Settings
from expertctl.user_request import NO_OVERRIDES, SamplingOverrides
from tests.factories import write_base
from tests.routing.experts import make_manifest
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["fast", "package_factory", "user_home"]

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3 Instruct": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]},
    "Qwen2.5 Instruct": {
        "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8,
        "top_k": 20, "pad_token_id": 0,
    },
    "Qwen3": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "Gemma 3": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
    "Mistral": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    "with min-p": {"do_sample": True, "temperature": 1.5, "min_p": 0.1},
}  # fmt: skip
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def write(folder: Path, document: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_of_a_published_base_are_those_that_transformers_reads(
    name: str, tmp_path: Path
) -> None:
    document = PUBLISHED[name]
    found = read_base_sampling(write(tmp_path, document))
    theirs = GenerationConfig.from_pretrained(str(tmp_path))
    assert found.settings == {n: getattr(theirs, n) for n in NAMES if n in document}
    assert found.warnings == ()


def test_a_base_that_says_not_to_sample_is_greedy_as_in_transformers(tmp_path: Path) -> None:
    found = read_base_sampling(write(tmp_path, {"do_sample": False}))
    assert not GenerationConfig.from_pretrained(str(tmp_path)).do_sample
    assert resolve_sampling(NO_OVERRIDES, [], prompt_task="default", base=found.settings).is_greedy
    warm = SamplingOverrides(temperature=0.5)
    assert resolve_sampling(warm, [], prompt_task="default", base=found.settings).temperature == 0.5


@pytest.mark.parametrize("value", [None, "absent"])
def test_what_is_null_or_missing_is_left_open(value: str | None, tmp_path: Path) -> None:
    document = {} if value else dict.fromkeys(NAMES)
    assert read_base_sampling(write(tmp_path, document)).settings == {}
    assert read_base_sampling(tmp_path / "nowhere").settings == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -0.5),
        ("temperature", 3),
        ("temperature", [0.5]),
        ("temperature", {"value": 0.5}),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 20.5),
        ("top_k", -1),
        ("top_k", 10**30),
        ("min_p", 2),
        ("repetition_penalty", 0.5),
        ("repetition_penalty", "x" * 100_000),
        ("repetition_penalty", "\x1b[31m"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_that_cannot_be_used_is_named_and_the_others_count(
    name: str, value: object, tmp_path: Path
) -> None:
    other = "top_p" if name != "top_p" else "min_p"
    found = read_base_sampling(write(tmp_path, {name: value, other: 0.5}))
    assert found.settings == {other: 0.5}
    [warning] = found.warnings
    assert warning.startswith(f"generation_config.json of the base: {name} (")
    assert warning.endswith("the setting is not used")
    assert warning.isprintable()
    assert len(warning) < 200


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"top_k": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"temperature"', "not a JSON object"),
        (b" " * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
    ids=["empty", "half", "UTF-16", "deep", "a number of 10000 digits", "list", "text", "huge"],
)
def test_a_file_that_cannot_be_read_is_an_error(data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(data)
    with pytest.raises(InvalidPackageError, match=problem) as caught:
        read_base_sampling(tmp_path)
    assert "generation_config.json" in caught.value.message


def expert(**decoding: Any) -> Manifest:
    return replace(
        make_manifest(), routing=Routing(task="json_parsing"), decoding=Decoding(**decoding)
    )


def test_the_user_then_the_expert_then_the_base_then_the_preset_decides() -> None:
    base = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    wishes = SamplingOverrides(temperature=0.1)
    params = resolve_sampling(wishes, [expert(top_k=5)], prompt_task="default", base=base)
    assert (params.temperature, params.top_k) == (0.1, 5)
    assert (params.top_p, params.repetition_penalty) == (0.8, 1.05)
    assert params.max_tokens == PRESETS["json_parsing"].max_tokens


@pytest.mark.parametrize("task", PRESETS)
def test_no_preset_of_ours_penalises_repetition(task: str) -> None:
    assert resolve_sampling(NO_OVERRIDES, [], prompt_task=task).repetition_penalty == 1.0


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    folder = write_base(tmp_path / "warm", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    known = json.loads((folder / "generation_config.json").read_text())
    return write(folder, {**known, "temperature": 0.9, "top_k": 20, "min_p": "low"})


def plan_on(user_home: HomeFixture, request: RouteRequest) -> Any:
    return Planner.open(Settings(Home(user_home.root), encoder="lexical")).plan(request)


def test_a_plan_takes_the_settings_of_its_base_and_tells_of_the_one_it_cannot_use(
    user_home: HomeFixture, package_factory: PackageFactory, base_dir: Path
) -> None:
    user_home.trust_keys("acme").bases.add(base_dir)
    user_home.install(
        package_factory.package("acme/plurals", base_dir=base_dir, base=read_base(base_dir),
                     decoding={"temperature": 0.25})
    )  # fmt: skip
    alone = plan_on(user_home, RouteRequest(prompt="Hi", base_alone=True))
    params = alone.result.plan.params
    assert (params.temperature, params.top_k, params.min_p) == (0.9, 20, 0.0)
    assert ["min_p ('low')" in warning for warning in alone.warnings] == [True]
    force = (ForcedExpert(Reference.parse("acme/plurals"), 1.0),)
    params = plan_on(user_home, RouteRequest(prompt="Hi", force=force)).result.plan.params
    assert (params.temperature, params.top_k) == (0.25, 20)


def test_the_identity_of_a_plan_does_not_depend_on_how_the_base_is_sampled(
    user_home: HomeFixture, base_dir: Path, tmp_path: Path
) -> None:
    user_home.bases.add(base_dir)
    request = RouteRequest(prompt="Hi", base_alone=True)
    before = plan_on(user_home, request).result.plan
    user_home.bases.add(write(base_dir, {"temperature": 0.1, "eos_token_id": 257}))
    after = plan_on(user_home, request).result.plan
    assert before.params.temperature != after.params.temperature
    assert before.identity == after.identity


def test_a_file_that_was_damaged_after_the_base_was_added_is_a_changed_base(
    user_home: HomeFixture, base_dir: Path
) -> None:
    user_home.bases.add(base_dir)
    (base_dir / "generation_config.json").write_text("{")
    with pytest.raises(BaseMismatchError, match=r"generation_config\.json"):
        plan_on(user_home, RouteRequest(prompt="Hi", base_alone=True))
