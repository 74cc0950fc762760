"""For every test: a home of its own, one thread, no settings of the person who runs it."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EXPERT_HOME, and none of the user's EXPERT_* settings."""
    for name in [n for n in os.environ if n.startswith("EXPERT_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "expert-home"
    monkeypatch.setenv("EXPERT_HOME", str(root))
    return root
