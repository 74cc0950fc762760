"""PEFT directories as verified packages would offer them to the engine."""

import json
from dataclasses import replace
from pathlib import Path

from expertctl.digest import Digest, FileDigest, hash_file
from expertctl.engine.adapter_load import LoadedAdapter, StoredFiles, adapter_bytes, load_adapter
from expertctl.engine.experts import ExpertSource
from expertctl.package.adapter_config import parse_config
from expertctl.package.adapter_spec import adapter_spec
from expertctl.package.tensor_file import read_table
from expertctl.schema.manifest import AdapterEntry, BaseRequirement, Manifest
from tests.factories import base_shapes

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def manifest_of(directory: Path) -> Manifest:
    """What a package of one adapter would say."""
    config = parse_config((directory / CONFIG).read_bytes(), what="test")
    spec = adapter_spec(config, read_table(directory / WEIGHTS), what="test")
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


def files_of(directory: Path) -> StoredFiles:
    paths = {
        name: (directory / name, FileDigest(name, *hash_file(directory / name)))
        for name in (WEIGHTS, CONFIG)
    }
    return StoredFiles(f"acme/{directory.name}@1.0.0", paths)


def load(*directories: Path) -> LoadedAdapter:
    """Load a package of these adapters, in this order."""
    first = directories[0]
    entries: list[AdapterEntry] = []
    paths: dict[str, tuple[Path, FileDigest]] = {}
    for number, directory in enumerate(directories):
        [entry] = manifest_of(directory).adapters
        weights, config = f"{number}.safetensors", f"{number}.json"
        entries.append(replace(entry, path=weights, config=config))
        files = files_of(directory).paths
        paths |= {weights: files[WEIGHTS], config: files[CONFIG]}
    manifest = replace(manifest_of(first), adapters=tuple(entries))
    return load_adapter(manifest, StoredFiles(manifest.ref, paths))


def source_of(directory: Path) -> ExpertSource:
    """An installed expert, as the store would offer it; its name stands for its content."""
    manifest, files = manifest_of(directory), files_of(directory)
    sizes = {path: file.size for path, (_, file) in files.paths.items()}
    cost = adapter_bytes(manifest, sizes)
    digest = Digest.of(directory.name.encode())
    return ExpertSource(manifest, digest, cost, lambda: load_adapter(manifest, files))


def linear_shapes(base: Path) -> dict[str, tuple[int, int]]:
    config = json.loads((base / "config.json").read_text())
    matrices = {n: s for n, s in base_shapes(config).items() if len(s) == 2}
    return {n.removesuffix(".weight"): (s[0], s[1]) for n, s in matrices.items()}
