"""A small base of routed experts as the example saves it, untrained."""

from pathlib import Path

import pytest
import torch

from examples.moe.train import build_model, save
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of sixteen experts, of which four are used."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("moe") / "base"
    save(build_model(layers=2, experts=16), folder)
    return folder
