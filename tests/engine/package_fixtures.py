"""PEFT directories as verified packages would offer them to the engine.

Packages on a base whose answers depend on them: untied, and the adapters are large.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.digest import Digest, FileDigest, hash_file
from expertctl.engine.adapters.experts import ExpertSource
from expertctl.engine.adapters.load import (
    LoadedAdapter,
    StoredFiles,
    estimate_adapter_bytes,
    load_adapter,
)
from expertctl.package.adapter import parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.tensor_file import read_table
from expertctl.schema.manifest import AdapterEntry, BaseRequirement, Manifest
from tests.factories import base_shapes, make_package, write_base
from tests.store.fixtures import make_key

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def make_adapter_manifest(directory: Path) -> Manifest:
    """What a package of one adapter would say."""
    config = parse_adapter_config((directory / CONFIG).read_bytes(), what="test")
    spec = build_adapter_spec(config, read_table(directory / WEIGHTS), what="test")
    entry = AdapterEntry(
        spec.kind, WEIGHTS, CONFIG, spec.dtype, spec.tensors, spec.rank, spec.tokens
    )
    return Manifest(
        schema=1,
        name=f"acme/{directory.name}",
        version="1.0.0",
        description="A random adapter",
        license="MIT",
        base=BaseRequirement(name="tiny", arch="sha256:" + "0" * 64, tokenizer="sha256:0"),
        adapters=(entry,),
    )


def list_package_files(directory: Path) -> StoredFiles:
    paths = {
        name: (directory / name, FileDigest(name, *hash_file(directory / name)))
        for name in (WEIGHTS, CONFIG)
    }
    return StoredFiles(f"acme/{directory.name}@1.0.0", paths)


def load_adapters(*directories: Path) -> LoadedAdapter:
    """Load a package of these adapters, in this order."""
    first = directories[0]
    entries: list[AdapterEntry] = []
    paths: dict[str, tuple[Path, FileDigest]] = {}
    for number, directory in enumerate(directories):
        [entry] = make_adapter_manifest(directory).adapters
        weights, config = f"{number}.safetensors", f"{number}.json"
        entries.append(replace(entry, path=weights, config=config))
        files = list_package_files(directory).paths
        paths |= {weights: files[WEIGHTS], config: files[CONFIG]}
    manifest = replace(make_adapter_manifest(first), adapters=tuple(entries))
    return load_adapter(manifest, StoredFiles(manifest.ref, paths))


def make_expert_source(directory: Path) -> ExpertSource:
    """An installed expert, as the store would offer it; its name stands for its content."""
    manifest, files = make_adapter_manifest(directory), list_package_files(directory)
    sizes = {path: file.size for path, (_, file) in files.paths.items()}
    cost = estimate_adapter_bytes(manifest, sizes)
    digest = Digest.compute(directory.name.encode())
    return ExpertSource(manifest, digest, cost, lambda: load_adapter(manifest, files))


def read_linear_shapes(base: Path) -> dict[str, tuple[int, int]]:
    config = json.loads((base / "config.json").read_text())
    matrices = {n: s for n, s in base_shapes(config).items() if len(s) == 2}
    return {n.removesuffix(".weight"): (s[0], s[1]) for n, s in matrices.items()}


@dataclass(frozen=True)
class EnginePackages:
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
            key=None if key is None else make_key(key),
            lora={"seed": seed, "scale": 0.4},
            **manifest,
        )


@pytest.fixture(scope="session")
def engine_packages(tmp_path_factory: pytest.TempPathFactory) -> EnginePackages:
    folder = tmp_path_factory.mktemp("market")
    base_dir = write_base(folder / "market-base", tie=False, seed=2)
    return EnginePackages(folder, base_dir, read_base(base_dir))
