from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from expertctl.digest import Digest
from expertctl.engine_config import DeviceName, Dtype, EngineConfig, MoeMiss
from expertctl.errors import (
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    format_install_command,
)
from expertctl.package.model_config import read_model_config
from expertctl.routing import plan as plan_module
from expertctl.routing.base_dtype import choose_dtype
from expertctl.routing.plan import (
    NumericSettings,
    Plan,
    SamplingParams,
    build_numeric_settings,
    check_identity,
    compute_plan_identity,
)
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from tests.factories import write_base
from tests.gguf_files import write_gguf
from tests.quantised_bases import BNB_INT8_CONFIG, edit_config, make_bnb_int8, quantise_base
from tests.routing.experts import make_numeric_settings


def test_numeric_settings_are_read_from_the_base(base: StoredBase) -> None:
    settings = make_numeric_settings(base, dtype="bf16", adapter_dtype="fp16")
    assert (settings.arch, settings.weights) == (base.identity.arch, base.identity.weights)
    assert settings.rope == {"theta": 1000000.0, "dims": 128, "scaling": None}
    assert (settings.dtype, settings.adapter_dtype) == ("bf16", "fp16")


def test_a_damaged_configuration_is_an_error(base: StoredBase) -> None:
    (base.path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InvalidPackageError, match="hidden_size"):
        make_numeric_settings(base)


ASKED = EngineConfig(dtype="float32")


def saved_as(settings: NumericSettings, base: StoredBase) -> Plan:
    return Plan(compute_plan_identity(settings, []), 0, base.name, (), SamplingParams())


def refused(plan: Plan, base: StoredBase, asked: EngineConfig = ASKED) -> IncompatibleError:
    now = build_numeric_settings(asked, base)
    with pytest.raises(IncompatibleError) as caught:
        check_identity(plan, compute_plan_identity(now, []), base=base, config=asked)
    return caught.value


def test_a_saved_plan_whose_numbers_are_the_same_is_taken(base: StoredBase) -> None:
    settings = make_numeric_settings(base)
    plan = saved_as(settings, base)
    check_identity(plan, compute_plan_identity(settings, []), base=base, config=ASKED)


@pytest.mark.parametrize(
    ("made", "asked", "options"),
    [
        ({"dtype": "int8"}, ASKED, "--dtype int8"),
        ({"adapter_dtype": "fp16"}, ASKED, "--adapter-dtype fp16"),
        ({"deterministic": True}, ASKED, "--deterministic"),
        ({}, replace(ASKED, deterministic=True), "--no-deterministic"),
        ({"moe_miss": "skip"}, ASKED, "--moe-miss skip"),
        ({"device": "cuda"}, ASKED, "--device cuda"),
        ({"engine": "transformers"}, ASKED, "--engine transformers"),
        (
            {"dtype": "int4", "deterministic": True},
            replace(ASKED, dtype="bf16"),
            "--dtype int4 --deterministic",
        ),
    ],
)
def test_a_plan_made_with_other_options_names_them_alone(
    made: dict[str, Any], asked: EngineConfig, options: str, base: StoredBase
) -> None:
    error = refused(saved_as(make_numeric_settings(base, **made), base), base, asked)
    assert error.message == f"the plan was made with {options}"
    assert error.hint == f"run it with {options}, or route the prompt again"


def test_an_edited_plan_is_called_edited_first(base: StoredBase) -> None:
    settings = make_numeric_settings(base)
    edited = replace(saved_as(settings, base), identity=Digest.compute(b"edited"))
    error = refused(edited, base)
    assert error.message.startswith("the plan was edited after it was saved, or the base acme/tiny")
    assert error.hint == "route the prompt again"
    changed = saved_as(replace(settings, weights=Digest.compute(b"x")), base)
    assert "the base acme/tiny or the engine changed" in refused(changed, base).message


def test_a_plan_of_another_base_names_it(base: StoredBase) -> None:
    settings = make_numeric_settings(base)
    other = replace(saved_as(replace(settings, arch=Digest.compute(b"y")), base), base="smollm2")
    error = refused(other, base)
    assert error.message == "the plan was made for the base smollm2, not for acme/tiny"


def test_another_engine_gives_other_numbers_and_names_its_version(base: StoredBase) -> None:
    native = make_numeric_settings(base)
    compat = make_numeric_settings(base, engine="transformers")
    assert compat.engine == f"transformers {version('transformers')}, peft {version('peft')}"
    assert replace(compat, engine=native.engine) == native


def test_a_base_that_only_transformers_runs_is_refused_with_the_way_out(base: StoredBase) -> None:
    foreign = replace(base, foreign=True)
    with pytest.raises(IncompatibleError, match="does not run the base acme/tiny") as caught:
        make_numeric_settings(foreign)
    assert "--engine transformers" in caught.value.hint
    settings = make_numeric_settings(foreign, engine="transformers")
    assert settings.rope == {}


def test_without_the_libraries_the_extra_is_named(
    base: StoredBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plan_module, "version", absent)
    with pytest.raises(NotFoundError, match="transformers, which is not installed") as caught:
        make_numeric_settings(base, engine="transformers")
    assert caught.value.hint == format_install_command("compat")


@pytest.mark.all
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
    assert choose_dtype(base, asked) == held
    assert choose_dtype(base, None, engine="transformers") == "float32"


@pytest.mark.all
@pytest.mark.parametrize(("vocab", "held"), [(1 << 18, ("int8", "bf16")), (1 << 17, ("float32",))])
def test_a_quantised_base_that_is_not_small_is_held_in_int8(
    vocab: int, held: tuple[str, ...], tmp_path: Path
) -> None:
    directory = write_base(
        tmp_path / "base", vocab=vocab, hidden=64, layers=1, intermediate=16, head_dim=16
    )
    quantise_base(directory, BNB_INT8_CONFIG, make_bnb_int8)
    base = BaseStore(tmp_path / "bases").add(directory)
    assert choose_dtype(base, None) == held[0]
    assert choose_dtype(base, None, device="cuda") == held[-1]
    assert choose_dtype(base, "int4") == "int4"


@pytest.mark.all
def test_a_quantised_base_with_other_blocks_is_held_in_int8_too(tmp_path: Path) -> None:
    sizes = {"vocab": 1 << 18, "hidden": 64, "layers": 1, "intermediate": 16, "head_dim": 16}
    directory = write_base(tmp_path / "base", arch="llama", **sizes)
    quantise_base(directory, BNB_INT8_CONFIG, make_bnb_int8)
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    edit_config(directory, **granite, embedding_multiplier=3.0)
    assert not read_model_config(directory).has_llama_blocks
    assert choose_dtype(BaseStore(tmp_path / "bases").add(directory), None) == "int8"


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "device", "held"),
    [
        ("Q8_0", "cpu", "gguf"),
        ("Q5_0", "cpu", "gguf"),
        ("Q8_0", "cuda", "bf16"),
        ("BF16", "cpu", "bf16"),
    ],
)
def test_a_base_with_weights_in_blocks_stays_in_them_on_a_processor(
    kind: str, device: DeviceName, held: str, tmp_path: Path
) -> None:
    sizes = {"hidden": 64, "layers": 1, "intermediate": 32, "head_dim": 16}
    directory = write_base(tmp_path / "base", vocab=1 << 18, **sizes)
    file = write_gguf(tmp_path / "base.gguf", directory, kind=kind)
    base = BaseStore(tmp_path / "bases").add(file)
    assert choose_dtype(base, None, device=device) == held
    assert choose_dtype(base, "float32", device=device) == "float32"


def test_deterministic_is_part_of_what_a_plan_is(base: StoredBase) -> None:
    plain, fixed = (
        make_numeric_settings(base, dtype="bf16", deterministic=d) for d in (False, True)
    )
    assert compute_plan_identity(plain) != compute_plan_identity(fixed)


def test_how_much_may_be_skipped_is_part_of_what_a_plan_is(base: StoredBase) -> None:
    def identity(miss: MoeMiss, cap: float) -> Digest:
        settings = make_numeric_settings(base, dtype="bf16", moe_miss=miss, moe_skip_cap=cap)
        return compute_plan_identity(settings)

    assert len({identity("exact", 0.25), identity("skip", 0.25), identity("skip", 1.0)}) == 3
    assert identity("exact", 0.25) == identity("exact", 1.0), "nothing is skipped there"
    assert identity("exact", 0.25) == compute_plan_identity(
        make_numeric_settings(base, dtype="bf16")
    )
