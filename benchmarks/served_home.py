"""A home to serve from: a base in the shape of Qwen3-0.6B and experts for it, random weights.

The base is in bfloat16 with the byte-level tokenizer of the starter base; each expert is a bfloat16
rank-16 LoRA on all seven projections, signed and installed as any other.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.inputs import PROJECTIONS, RANK, VOCABULARY, shapes
from benchmarks.prefix import write_base
from expertctl.install.install import install_files
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build, plan_build
from expertctl.package.draft import Overrides
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.policy import TrustStore

BASE = "qwen3-0.6b-shape"
SPREAD = 0.01


def furnish(root: Path, scratch: Path, *, experts: int) -> Home:
    """Make a home with the base and so many experts; ``scratch`` is used on the way."""
    home, base_dir = Home(root / "home"), write_base(scratch / "base")
    _give_text_to_all_tokens(base_dir / "tokenizer.json")
    bases, trust = BaseStore(home.bases), TrustStore(home.trust)
    bases.add(base_dir, name=BASE)
    key = PrivateKey.generate("ed25519")
    trust.add(key.public, name="bench", namespaces=["bench"])
    facts = read_base(base_dir)
    for number in range(experts):
        package = _package(scratch / f"expert-{number}", number, facts, key)
        install_files([package], store=Store(home.store), bases=bases, trust=trust)
        package.unlink()
    return home


def expert_name(number: int) -> str:
    """Return how an expert is called."""
    return f"bench/expert-{number}"


def _give_text_to_all_tokens(path: Path) -> None:
    """Spell the tokens beyond bytes, so that whatever is drawn is text for whoever reads along."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max(added["id"] for added in tokenizer["added_tokens"])
    vocabulary.update({f"w{number}": number for number in range(first, VOCABULARY)})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def _package(folder: Path, number: int, facts: BaseFacts, key: PrivateKey) -> Path:
    folder.mkdir()
    adapter, package = folder / "adapter", folder.with_suffix(".expert")
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    save_file(dict(_tensors(number)), weights, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name in PROJECTIONS),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    overrides = Overrides(
        name=expert_name(number), version="1.0.0", description=f"benchmark's adapter {number}"
    )
    build(plan_build(adapter, overrides, base=facts), package, key=key)
    weights.unlink()
    return package


def _tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    for module, (out, into) in shapes().items():
        name = f"base_model.model.{module}"
        for part, shape in (("A", (RANK, into)), ("B", (out, RANK))):
            numbers = torch.randn(shape, generator=drawn) * SPREAD
            yield f"{name}.lora_{part}.weight", numbers.bfloat16()
