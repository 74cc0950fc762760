"""Manifests and installed experts as the router sees them, made in memory."""

import json
from pathlib import Path
from typing import Any

from expertctl.digest import Digest, FileDigest
from expertctl.package.base_model import BaseIdentity
from expertctl.routing.candidate import Installed
from expertctl.schema.manifest import (
    AdapterEntry,
    BaseRequirement,
    Composition,
    Decoding,
    Manifest,
    Routing,
)
from expertctl.store.base_record import StoredBase
from expertctl.store.ref import RequiredBase, StoredExpert

ARCH, WEIGHTS, TOKENIZER = (Digest(digit * 64) for digit in "abc")


def manifest(
    name: str = "acme/sql",
    version: str = "1.0.0",
    *,
    description: str = "Writes SQL queries.",
    arch: Digest = ARCH,
    decoding: Decoding = Decoding(),  # noqa: B008  # frozen
    composition: dict[str, Any] | None = None,
    **routing: Any,
) -> Manifest:
    """A manifest for the base of these tests; further arguments are those of ``routing``."""
    return Manifest(
        schema=1,
        name=name,
        version=version,
        description=description,
        license="Apache-2.0",
        base=BaseRequirement("acme/tiny", str(arch), str(TOKENIZER), weights=str(WEIGHTS)),
        adapters=(
            AdapterEntry("lora", "adapter.safetensors", "adapter_config.json", "float32", 2, 4),
        ),
        routing=Routing(**routing),
        composition=Composition(**(composition or {})),
        decoding=decoding,
    )


def installed(
    manifest: Manifest,
    *,
    signer: str | None = "sha256:" + "e" * 64,
    revoked: bool = False,
    size: int = 1 << 20,
    registry: str = "local",
) -> Installed:
    """An installed expert whose adapter has ``size`` bytes; its digests are made from its name."""
    files = (
        FileDigest("README.md", 10, Digest.of(b"readme")),
        FileDigest("adapter.safetensors", size, Digest.of(manifest.ref.encode())),
    )
    base = manifest.base
    stored = StoredExpert(
        registry=registry,
        package=manifest.package,
        version=manifest.semver,
        content_digest=content_digest(manifest.ref),
        package_digest=Digest.of(f"package {manifest.ref}".encode()),
        files=files,
        signature=None,
        signer=signer,
        base=RequiredBase(base.name, base.revision, ARCH, WEIGHTS, TOKENIZER),
    )
    return Installed(stored, manifest, revoked=revoked)


def content_digest(ref: str) -> Digest:
    """The content digest that `installed` gives a reference."""
    return Digest.of(f"content {ref}".encode())


def base_at(directory: Path) -> StoredBase:
    """A base with the digests of these manifests, its configuration in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen3",
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    identity = BaseIdentity("acme/tiny", None, ARCH, WEIGHTS, TOKENIZER)
    return StoredBase("acme/tiny", directory, identity, (), {}, copied=False, added_ns=0)
