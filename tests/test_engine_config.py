"""What an engine cannot do together is refused by the names of the options."""

import subprocess
import sys

import pytest

from expertctl.engine_config import EngineConfig, WarmupConfig, check_engine_config
from expertctl.errors import UsageError


@pytest.mark.parametrize("cap", [-0.1, 1.1, float("nan")])
def test_what_may_be_left_out_is_a_share(cap: float) -> None:
    with pytest.raises(UsageError, match="--moe-skip-cap"):
        check_engine_config(EngineConfig(moe_skip_cap=cap))


def test_a_budget_is_more_than_nothing() -> None:
    check_engine_config(EngineConfig(memory_budget=1000))
    with pytest.raises(UsageError, match="a memory budget of 0 bytes is too small"):
        check_engine_config(EngineConfig(memory_budget=0))


def test_to_leave_out_what_is_not_there_and_to_promise_bits_is_refused() -> None:
    with pytest.raises(UsageError, match="--deterministic"):
        check_engine_config(EngineConfig(moe_miss="skip", deterministic=True))
    with pytest.raises(UsageError, match="--moe-miss skip"):
        check_engine_config(EngineConfig(moe_miss="skip", engine="transformers"))


def test_a_device_may_leave_out_what_is_not_there_and_computes_with_no_copy() -> None:
    check_engine_config(EngineConfig(moe_miss="skip", device="cuda"))
    check_engine_config(EngineConfig(moe_cold="read", device="cuda"))
    for cold in ("map", "direct"):
        with pytest.raises(UsageError, match=f"--device cuda does not support --moe-cold {cold}$"):
            check_engine_config(EngineConfig(moe_cold=cold, device="cuda"))  # type: ignore[arg-type]


def test_a_configuration_is_a_value() -> None:
    assert hash(EngineConfig()) == hash(EngineConfig(moe=WarmupConfig()))


def test_the_module_loads_no_library_and_no_other_stage() -> None:
    program = "import sys, expertctl.engine_config; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert not {"torch", "numba", "numpy", "cryptography", "msgspec", "typer"} & loaded
    own = {name for name in loaded if name.split(".")[0] == "expertctl"}
    assert own == {"expertctl", "expertctl.engine_config", "expertctl.errors"}
