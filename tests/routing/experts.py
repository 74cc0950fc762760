"""Manifests and installed experts as the router sees them, made in memory.

Prompts routed among a few experts made in memory, lexically.

Examples of an honest package, for those that copy them.

Prompts that are for none of the experts of the starter pack.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertctl.digest import Digest, FileDigest
from expertctl.engine_config import EngineConfig
from expertctl.package.base_model import BaseIdentity
from expertctl.routing.candidate import InstalledExpert, RoutingCandidate
from expertctl.routing.manifest_lint import SeenManifests
from expertctl.routing.plan import NumericSettings, build_numeric_settings
from expertctl.routing.router import RoutingResult
from expertctl.schema.manifest import (
    AdapterEntry,
    BaseRequirement,
    CompositionRules,
    Decoding,
    Manifest,
    Routing,
)
from expertctl.store.base_record import StoredBase
from expertctl.store.refs import RequiredBase, StoredExpert

ARCH, WEIGHTS, TOKENIZER = (Digest(digit * 64) for digit in "abc")


def make_manifest(
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
        composition=CompositionRules(**(composition or {})),
        decoding=decoding,
    )


def make_installed(
    manifest: Manifest,
    *,
    signer: str | None = "sha256:" + "e" * 64,
    revoked: bool = False,
    size: int = 1 << 20,
    registry: str = "local",
) -> InstalledExpert:
    """An installed expert whose adapter has ``size`` bytes; its digests are made from its name."""
    files = (
        FileDigest("README.md", 10, Digest.compute(b"readme")),
        FileDigest("adapter.safetensors", size, Digest.compute(manifest.ref.encode())),
    )
    base = manifest.base
    stored = StoredExpert(
        registry=registry,
        package=manifest.package,
        version=manifest.semver,
        content_digest=make_content_digest(manifest.ref),
        package_digest=Digest.compute(f"package {manifest.ref}".encode()),
        files=files,
        signature=None,
        signer=signer,
        base=RequiredBase(base.name, base.revision, ARCH, WEIGHTS, TOKENIZER),
    )
    return InstalledExpert(stored, manifest, revoked=revoked)


def make_content_digest(ref: str) -> Digest:
    """The content digest that `installed` gives a reference."""
    return Digest.compute(f"content {ref}".encode())


def make_base(directory: Path) -> StoredBase:
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


SORT = ("Sort these numbers: 41, 7, 23", "Put 41, 7, 23 in ascending order")
QUERY = ("Write an SQL query for the name of users with age over 30",)
PROMPT = "Sort these numbers: 8, 3, 99"
Router = Callable[..., RoutingResult]
"""Experts, and what a request says beside ``PROMPT``, in; see ``conftest.py``."""


def make_sort_expert(
    name: str = "acme/sort", version: str = "1.0.0", **kwargs: Any
) -> InstalledExpert:
    keys = ("signer", "revoked", "size")
    place = {key: kwargs.pop(key) for key in keys if key in kwargs}
    kwargs.setdefault("examples", SORT)
    description = kwargs.pop("description", "Sorts numbers.")
    return make_installed(make_manifest(name, version, description=description, **kwargs), **place)


def make_sql_expert(
    name: str = "acme/sql", version: str = "1.0.0", **kwargs: Any
) -> InstalledExpert:
    return make_sort_expert(
        name, version, examples=QUERY, description="Writes SQL queries.", **kwargs
    )


def list_refs(result: RoutingResult) -> list[str]:
    return [expert.ref for expert in result.plan.experts]


def find_candidate(result: RoutingResult, name: str) -> RoutingCandidate:
    return next(c for c in result.candidates if c.expert.ref.startswith(name))


def make_soft_prompt_expert(name: str, tokens: int) -> InstalledExpert:
    """An expert for the prompt, with a soft prompt."""
    plain = make_sort_expert(name)
    entry = AdapterEntry("soft_prompt", "p.safetensors", "p.json", "float32", 1, tokens=tokens)
    return replace(plain, manifest=replace(plain.manifest, adapters=(entry,)))


EXAMPLES = (
    "write a query for all the users over 30",
    "which orders of last month are late",
    "select the names of customers in Oslo",
    "count the rows of this table for me",
    "how many hotels have a pool",
    "list books that cost less than 25",
    "what is the average price of a phone",
    "join the orders and the customers",
)


UNRELATED = (
    "What is the capital of France?",
    "Tell me a joke",
    "Write a poem about rain",
    "Who wrote Hamlet?",
    "How do I bake bread?",
    "Explain photosynthesis in simple words",
    "What is the weather like today?",
    "Translate good morning into Spanish",
    "Write a short story about a dragon",
    "Summarise the plot of Moby Dick",
    "Write a function that reverses a string in Python",
    "Give me a recipe for pancakes",
    "What is 12 times 7?",
    "Why is the sky blue?",
    "Hello, how are you?",
    "Write an email to my boss asking for leave",
)


def make_numeric_settings(base: StoredBase, **options: Any) -> NumericSettings:
    """Return the numeric settings of a base with these options, in float32 by default."""
    return build_numeric_settings(EngineConfig(**{"dtype": "float32", **options}), base)


def collect_manifests(manifests: Iterable[Manifest]) -> SeenManifests:
    """Return the manifests that were seen before, the earliest first."""
    seen = SeenManifests()
    for manifest in manifests:
        seen.add(manifest)
    return seen
