"""Adapters of the benchmarks as the store would offer them, once they are installed."""

from pathlib import Path

from expertctl.digest import FileDigest, hash_file
from expertctl.engine.adapter_load import StoredFiles, adapter_bytes, load_adapter
from expertctl.engine.experts import ExpertSource
from expertctl.package.tensor_file import read_table
from expertctl.schema.manifest import AdapterEntry, BaseRequirement, Manifest

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def installed(directory: Path, *, base: str) -> ExpertSource:
    """Offer the float32 LoRA of a directory, named after it; its files are hashed now."""
    files = {
        name: (directory / name, FileDigest(name, *hash_file(directory / name)))
        for name in (WEIGHTS, CONFIG)
    }
    tensors = len(read_table(directory / WEIGHTS).tensors)
    manifest = Manifest(
        schema=1,
        name=f"bench/{directory.name}",
        version="1.0.0",
        description="a benchmark's adapter",
        license="Apache-2.0",
        base=BaseRequirement(name=base, arch="", tokenizer=""),
        adapters=(AdapterEntry("lora", WEIGHTS, CONFIG, "float32", tensors),),
    )
    stored = StoredFiles(manifest.ref, files)
    cost = adapter_bytes(manifest, {name: file.size for name, (_, file) in files.items()})
    digest = files[WEIGHTS][1].digest
    return ExpertSource(manifest, digest, cost, lambda: load_adapter(manifest, stored))
