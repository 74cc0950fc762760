"""From options, settings and defaults to the configuration of an engine."""

import inspect
from pathlib import Path

import pytest

from expertctl.cli.help import expand_flags
from expertctl.cli.run_options import EngineFlags, MissFlags, NumericsFlags, WarmupFlags
from expertctl.engine_config import COLD_START, EngineConfig, SharePins, TopPins, WarmupConfig
from expertctl.errors import NotFoundError, UsageError
from expertctl.settings import Home, Settings


@pytest.fixture
def unset(tmp_path: Path) -> Settings:
    return Settings(Home(tmp_path))


@pytest.fixture
def configured(tmp_path: Path) -> Settings:
    return Settings(
        Home(tmp_path),
        dtype="int8",
        adapter_dtype="fp16",
        deterministic=True,
        memory_budget=1 << 30,
        moe_cold="read",
        moe_warmup="full",
        moe_learn=False,
    )


def test_without_options_and_settings_there_are_the_defaults(unset: Settings) -> None:
    assert EngineFlags().resolve(unset) == EngineConfig()
    assert EngineFlags().resolve(unset, warmup=WarmupFlags()) == EngineConfig()


def test_a_setting_is_used_where_no_option_is_given(configured: Settings) -> None:
    found = EngineFlags().resolve(configured, warmup=WarmupFlags(), engine="transformers")
    assert found == EngineConfig(
        engine="transformers",
        dtype="int8",
        adapter_dtype="fp16",
        deterministic=True,
        memory_budget=1 << 30,
        moe_cold="read",
        moe=WarmupConfig(warmup="full", learns=False),
    )


def test_an_option_is_used_instead_of_its_setting(configured: Settings) -> None:
    numerics = NumericsFlags("bf16", "published", deterministic=False)
    warmup = WarmupFlags(moe_cold="direct", moe_pin="50%", moe_warmup="none", moe_exchange=0.5)
    found = EngineFlags("cpu", "2MiB", numerics, MissFlags("skip", 0.5)).resolve(
        configured, warmup=warmup, learn=True
    )
    assert found == EngineConfig(
        dtype="bf16",
        memory_budget=2 << 20,
        moe_miss="skip",
        moe_skip_cap=0.5,
        moe_cold="direct",
        moe=WarmupConfig(pins=SharePins(0.5), warmup="none", exchange=0.5),
    )


def test_a_command_without_options_for_routed_experts_reads_no_settings_for_them(
    tmp_path: Path,
) -> None:
    settings = Settings(Home(tmp_path), moe_cold="mapped", moe_warmup="perhaps", moe_learn=False)
    assert EngineFlags().resolve(settings) == EngineConfig()
    with pytest.raises(UsageError, match="moe_cold 'mapped' is not supported"):
        EngineFlags().resolve(settings, warmup=WarmupFlags())


@pytest.mark.parametrize("key", ["dtype", "adapter_dtype", "device"])
def test_an_unknown_setting_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{key} 'int3' is not supported"):
        EngineFlags().resolve(Settings(Home(tmp_path), **{key: "int3"}))  # type: ignore[arg-type]


def test_options_of_routed_experts_are_checked_before_anything_is_loaded(
    unset: Settings, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"--moe-skip-cap 0\.5: no routed expert is skipped"):
        EngineFlags(miss=MissFlags(moe_skip_cap=0.5)).resolve(unset)
    with pytest.raises(UsageError, match="--moe-exchange 2 is not a share"):
        WarmupFlags(moe_exchange=2).resolve(unset, learn=None)
    with pytest.raises(NotFoundError):
        WarmupFlags(moe_profile=tmp_path / "none.json").resolve(unset, learn=None)
    pinned = WarmupFlags(moe_pin="8").resolve(unset, learn=False)
    assert pinned == WarmupConfig(pins=TopPins(8), learns=False) != COLD_START


def test_a_group_of_groups_becomes_options_in_the_order_of_the_fields() -> None:
    given: list[EngineFlags] = []

    @expand_flags
    def command(*, flags: EngineFlags, last: bool = False) -> None:
        given.append(flags)

    names = list(inspect.signature(command).parameters)
    options = [*NumericsFlags.__slots__, *MissFlags.__slots__]
    assert names == ["device", "memory_budget", *options, "last"]
    command(**{**dict.fromkeys(names), "dtype": "int4", "moe_miss": "skip"})
    assert given == [EngineFlags(numerics=NumericsFlags("int4"), miss=MissFlags("skip"))]
