"""The functions that are compiled together are those that a base without adapters needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.decoder_program import list_common_sources
from expertctl.engine_config import Dtype
from expertctl.package.model_config import read_model_config
from tests.factories import write_base

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_a_run_of_a_base_needs_the_common_functions_and_no_others(
    dtype: Dtype, tmp_path: Path
) -> None:
    base, home = write_base(tmp_path / "base", **SIZES), tmp_path / "home"
    command = [sys.executable, "-m", "expertctl", "run", "hello", "--base", str(base)]
    options = ["--dtype", dtype, "--deterministic", "--greedy", "--max-tokens", "4"]
    environment = {**os.environ, "EXPERT_HOME": str(home)}
    subprocess.run([*command, *options], env=environment, check=True, capture_output=True)
    backend = PackedBackend(read_model_config(base), dtype, "published", 0)
    wanted = list_common_sources(backend.config, backend.scheme, backend.kv_scheme)
    assert {path.stem for path in home.glob("kernels/*/*.code")} == set(wanted)
