"""Replaying a saved plan gives the same tokens and bit-identical logits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.errors import DigestError, IncompatibleError, NotFoundError, RevokedError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.plan import SavedPlan, parse_plan
from expertctl.routing.request import ForcedExpert
from expertctl.user_request import NO_OVERRIDES, SamplingOverrides
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import planner, request, run
from tests.factories import make_package
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["engine_packages", "fast", "user_home"]

KINDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "lora": [("lora", {"seed": 1, "scale": 0.4})],
    "dora": [("dora", {"seed": 2, "rank": 3})],
    "ia3": [("ia3", {"seed": 3, "dtype": "bfloat16"})],
    "soft": [("soft_prompt", {"seed": 4, "tokens": 5})],
    "several": [("ia3", {"seed": 5}), ("lora", {"seed": 6, "dtype": "float16"})],
}
WARM = SamplingOverrides(temperature=1.3, top_p=1.0, max_tokens=12)


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(*(package(engine_packages, name) for name in KINDS))


def package(engine_packages: EnginePackages, name: str, *, key: str = "acme") -> Any:
    folder = engine_packages.folder / f"replay-{name}-{key}"
    base = read_base(engine_packages.base_dir)
    adapters: Any = KINDS[name]
    return make_package(
        folder,
        f"acme/{name}",
        base_dir=engine_packages.base_dir,
        base=base,
        key=make_key(key),
        adapters=adapters,
    )


def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), budget=64 << 20)


@contextmanager
def scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AnyArray]]:
    """All scores that a decoder gives, in order."""
    seen: list[AnyArray] = []
    plain = PlainDecoder._compute_logits

    def watched(self: PlainDecoder, hidden: AnyArray, deltas: Any) -> AnyArray:
        logits = plain(self, hidden, deltas)
        seen.append(logits.copy())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(PlainDecoder, "_compute_logits", watched)
        yield seen


def saved(result: RunResult, kind: str) -> SavedPlan:
    """The plan on its way through a file of `run --json` or `route --json`."""
    document = result.to_json() if kind == "run" else result.planned.result.to_json()
    return parse_plan(json.dumps(document).encode())


def drawn(*experts: NamedExpert, **options: Any) -> RunRequest:
    """A request whose tokens are drawn, with a seed that nobody chose."""
    wanted = request(*experts, **options)
    return replace(wanted, route=replace(wanted.route, sampling=WARM, seed=None))


def replayed(plan: SavedPlan) -> RunRequest:
    """A request that says nothing but the plan."""
    wanted = request(saved=plan)
    return replace(wanted, route=replace(wanted.route, sampling=NO_OVERRIDES, seed=None))


@pytest.mark.parametrize("kind", ["run", "route"])
@pytest.mark.parametrize(
    "chain",
    [
        [("lora", 1.0)],
        [("dora", 0.7), ("ia3", 1.0), ("lora", -0.5)],
        [("soft", 1.0), ("several", 0.3), ("dora", 1.0), ("ia3", 0.0)],
        [],
    ],
    ids=str,
)
def test_a_saved_plan_gives_the_same_tokens_and_scores_to_the_bit(
    chain: list[tuple[str, float]],
    kind: str,
    user_home: HomeFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = [ForcedExpert(Reference.parse(f"acme/{name}"), weight) for name, weight in chain]
    alone = {} if chain else {"route": {"base_alone": True}}
    with scores(monkeypatch) as first:
        result = run(engine(user_home), drawn(*experts, **alone))
    with scores(monkeypatch) as second:
        again = run(engine(user_home), replayed(saved(result, kind)))
    assert again.generated.tokens == result.generated.tokens
    assert again.planned.result.plan.to_json() == result.planned.result.plan.to_json()
    assert not any("saved" in warning for warning in again.warnings)
    assert len(first) == len(second) > 1
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert np.abs(first[0]).max() > 0


def lora(user_home: HomeFixture) -> SavedPlan:
    result = run(engine(user_home), drawn(ForcedExpert(Reference.parse("acme/lora"))))
    return saved(result, "run")


def test_another_number_of_threads_is_warned_of(user_home: HomeFixture) -> None:
    plan = lora(user_home)
    assert plan.threads is not None
    result = run(engine(user_home), replayed(replace(plan, threads=plan.threads + 7)))
    told = f"by a run with {plan.threads + 7} threads, this one has {plan.threads}: the last bits"
    assert any(told in warning for warning in result.warnings)


def test_a_package_that_was_signed_anew_gives_the_same_and_is_named(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.trust_keys("bob")
    first = run(engine(user_home), drawn(ForcedExpert(Reference.parse("acme/lora"))))
    user_home.install(package(engine_packages, "lora", key="bob"))
    again = run(engine(user_home), replayed(saved(first, "run")))
    assert again.generated.tokens == first.generated.tokens
    [warning] = [w for w in again.warnings if "signed again" in w]
    assert warning.startswith("acme/lora@1.0.0 was signed again after the plan was saved")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_tampered_file_behind_a_plan_is_refused_by_name(
    user_home: HomeFixture, name: str
) -> None:
    plan = lora(user_home)
    expert = user_home.store.find(Reference.parse("acme/lora"))
    blob = user_home.store.blob_path(expert.find_file(name).digest)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[-2] ^= 1
    blob.write_bytes(data)
    for on in ("refuse", "queue"):
        with pytest.raises(DigestError, match=rf"acme/lora@1\.0\.0: {name}"):
            run(engine(user_home), replace(replayed(plan), on_budget=on))


def test_what_a_revoked_key_signed_is_refused(user_home: HomeFixture) -> None:
    plan = lora(user_home)
    user_home.trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        run(engine(user_home), replayed(plan))


def test_a_plan_of_a_file_that_was_never_installed_names_it(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    file = FileExpert(engine_packages.package("acme/loose", key=None, seed=8))
    result = run(engine(user_home), drawn(file))
    with pytest.raises(NotFoundError, match=r"acme/loose@1\.0\.0 of the saved plan is not"):
        run(engine(user_home), replayed(saved(result, "run")))


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan["experts"][0].update(weight=0.5),
        lambda plan: plan["experts"].reverse(),
        lambda plan: plan["experts"].pop(),
        lambda plan: plan["experts"][0].update(kind="ia3"),
        lambda plan: plan["experts"][0].update(ref="acme/other@1.0.0"),
        lambda plan: plan.update(identity="sha256:" + "0" * 64),
    ],
)
def test_a_plan_that_was_edited_is_refused(user_home: HomeFixture, edit: Any) -> None:
    experts = [ForcedExpert(Reference.parse(f"acme/{name}")) for name in ("lora", "dora")]
    document: Any = run(engine(user_home), drawn(*experts)).to_json()
    edit(document["plan"])
    plan = parse_plan(json.dumps(document).encode())
    with pytest.raises(IncompatibleError, match="edited"):
        run(engine(user_home), replayed(plan))
