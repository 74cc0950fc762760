"""Packages on a base whose answers depend on them: untied, and the adapters are large."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertctl.package.base_model import BaseFacts, read_base
from tests.factories import make_package, write_base
from tests.store.shop import a_key


@dataclass(frozen=True)
class Market:
    """Makes packages; the same name gives the same file."""

    folder: Path
    base_dir: Path
    base: BaseFacts

    def package(
        self, name: str = "acme/sql", *, key: str | None = "acme", seed: int = 1, **manifest: Any
    ) -> Path:
        """A package signed with the key of that name; ``seed`` decides its weights."""
        folder = self.folder / f"{name.replace('/', '-')}-{key}-{seed}-{len(manifest)}"
        return make_package(
            folder,
            name,
            base_dir=self.base_dir,
            base=self.base,
            key=None if key is None else a_key(key),
            lora={"seed": seed, "scale": 0.4},
            **manifest,
        )


@pytest.fixture(scope="session")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    folder = tmp_path_factory.mktemp("market")
    base_dir = write_base(folder / "market-base", tie=False, seed=2)
    return Market(folder, base_dir, read_base(base_dir))
