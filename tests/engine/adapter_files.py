"""PEFT directories as verified packages would offer them to the engine."""

import json
from pathlib import Path
from typing import Any, cast

from expertctl.digest import FileDigest, hash_file
from expertctl.engine.adapter_load import LoadedAdapter, StoredFiles, load_adapter
from expertctl.package.tensor_file import read_table
from expertctl.schema.manifest import AdapterEntry, BaseRequirement, Dtype, Manifest
from tests.factories import base_shapes

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def manifest_of(directory: Path, *, dtype: str = "float32", kind: str = "lora") -> Manifest:
    tensors = len(read_table(directory / WEIGHTS).tensors)
    entry = AdapterEntry(cast(Any, kind), WEIGHTS, CONFIG, cast(Dtype, dtype), tensors)
    return Manifest(
        schema=1,
        name=f"acme/{directory.name}",
        version="1.0.0",
        description="A random LoRA",
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


def load(directory: Path) -> LoadedAdapter:
    return load_adapter(manifest_of(directory), files_of(directory))


def linear_shapes(base: Path) -> dict[str, tuple[int, int]]:
    config = json.loads((base / "config.json").read_text())
    matrices = {n: s for n, s in base_shapes(config).items() if len(s) == 2}
    return {n.removesuffix(".weight"): (s[0], s[1]) for n, s in matrices.items()}
