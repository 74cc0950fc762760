"""Manifests and installed experts as the router sees them, made in memory."""

from typing import Any

from expertctl.digest import Digest
from expertctl.schema.manifest import (
    AdapterEntry,
    BaseRequirement,
    Composition,
    Decoding,
    Manifest,
    Routing,
)

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
