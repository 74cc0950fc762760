from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.routing import numerics
from expertctl.routing.numerics import check_identity, dtype_of, numeric_settings
from expertctl.routing.plan import Plan, SamplingParams, plan_identity
from expertctl.routing.request import Dtype, MoeMiss
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from tests.factories import write_base


def test_numeric_settings_are_read_from_the_base(base: StoredBase) -> None:
    settings = numeric_settings(base, dtype="bf16", adapter_dtype="fp16")
    assert (settings.arch, settings.weights) == (base.identity.arch, base.identity.weights)
    assert settings.rope == {"theta": 1000000.0, "dims": 128, "scaling": None}
    assert (settings.dtype, settings.adapter_dtype) == ("bf16", "fp16")


def test_a_damaged_configuration_is_an_error(base: StoredBase) -> None:
    (base.path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InvalidPackageError, match="hidden_size"):
        numeric_settings(base, dtype="float32", adapter_dtype="published")


def test_a_saved_plan_is_refused_where_its_numbers_would_differ(base: StoredBase) -> None:
    settings = numeric_settings(base, dtype="float32", adapter_dtype="published")
    plan = Plan(plan_identity(settings, []), 0, base.name, (), SamplingParams())
    check_identity(plan, plan_identity(settings, []))
    for other in (replace(settings, dtype="int8"), replace(settings, weights=Digest.of(b"x"))):
        with pytest.raises(IncompatibleError, match="the plan was made as sha256:"):
            check_identity(plan, plan_identity(other, []))


def test_another_engine_gives_other_numbers_and_names_its_version(base: StoredBase) -> None:
    native = numeric_settings(base, dtype="float32", adapter_dtype="published")
    compat = numeric_settings(
        base, dtype="float32", adapter_dtype="published", engine="transformers"
    )
    assert compat.engine == f"transformers {version('transformers')}, peft {version('peft')}"
    assert replace(compat, engine=native.engine) == native
    plan = Plan(plan_identity(native, []), 0, base.name, (), SamplingParams())
    with pytest.raises(IncompatibleError, match="engine") as caught:
        check_identity(plan, plan_identity(compat, []))
    assert "--engine" in caught.value.hint


def test_a_base_that_only_transformers_runs_is_refused_with_the_way_out(base: StoredBase) -> None:
    foreign = replace(base, foreign=True)
    with pytest.raises(IncompatibleError, match="does not run the base acme/tiny") as caught:
        numeric_settings(foreign, dtype="float32", adapter_dtype="published")
    assert "--engine transformers" in caught.value.hint
    settings = numeric_settings(
        foreign, dtype="float32", adapter_dtype="published", engine="transformers"
    )
    assert settings.rope == {}


def test_without_the_libraries_the_extra_is_named(
    base: StoredBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(numerics, "version", absent)
    with pytest.raises(NotFoundError, match="transformers, which is not installed") as caught:
        numeric_settings(base, dtype="float32", adapter_dtype="published", engine="transformers")
    assert caught.value.hint == "pip install 'expertctl[compat]'"


@pytest.mark.parametrize(
    ("stored", "vocab", "asked", "held"),
    [
        ("bfloat16", 1 << 18, None, "bf16"),
        ("bfloat16", 1 << 18, "float32", "float32"),
        ("bfloat16", 1 << 17, None, "float32"),
        ("bfloat16", 1 << 17, "bf16", "bf16"),
        ("float16", 1 << 18, None, "float32"),
        ("float32", 1 << 18, None, "float32"),
        ("float32", 1 << 18, "int4", "int4"),
    ],
)
def test_a_base_that_is_not_small_is_held_as_it_is_stored_where_nothing_is_asked(
    stored: str, vocab: int, asked: Dtype | None, held: str, tmp_path: Path
) -> None:
    """A vocabulary of 2¹⁸ and a width of 64 are 64 MiB in float32."""
    sizes = {"hidden": 64, "layers": 1, "intermediate": 16}
    directory = write_base(tmp_path / "base", dtype=stored, vocab=vocab, **sizes)
    base = BaseStore(tmp_path / "bases").add(directory)
    assert dtype_of(base, asked) == held
    assert dtype_of(base, None, engine="transformers") == "float32"


def test_deterministic_is_part_of_what_a_plan_is(base: StoredBase) -> None:
    plain, fixed = (
        numeric_settings(base, dtype="bf16", adapter_dtype="published", deterministic=d)
        for d in (False, True)
    )
    assert plan_identity(plain) != plan_identity(fixed)


def test_how_much_may_be_skipped_is_part_of_what_a_plan_is(base: StoredBase) -> None:
    def identity(miss: MoeMiss, cap: float) -> Digest:
        settings = numeric_settings(
            base, dtype="bf16", adapter_dtype="published", moe_miss=miss, moe_skip_cap=cap
        )
        return plan_identity(settings)

    assert len({identity("exact", 0.25), identity("skip", 0.25), identity("skip", 1.0)}) == 3
    assert identity("exact", 0.25) == identity("exact", 1.0), "nothing is skipped there"
    assert identity("exact", 0.25) == plan_identity(
        numeric_settings(base, dtype="bf16", adapter_dtype="published")
    )
