"""A home to serve from while its experts change: the starter base, and experts of all kinds for it.

Beside the starter pack there are experts of this benchmark, each in two versions: LoRAs with drawn
weights, and the starter's DoRA, IA³ and soft prompt under other names.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from expertctl.install.install import install_files
from expertctl.install.starter import STARTER, install_starter, read_pins
from expertctl.package.adapter_files import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build, plan_build
from expertctl.package.draft import Overrides
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.policy import TrustStore

NAMESPACE = "soak"
BASE = read_pins().base.name
VERSIONS = ("1.0.0", "2.0.0")
RANKS = (8, 16, 24, 32)
RENAMED = {"dora": "starter/past", "ia3": "starter/capitals", "soft-prompt": "starter/exclaim"}
"""Experts of this benchmark whose weights are those of another."""
SPREAD = 0.01

Packages = Mapping[str, Mapping[str, Path]]
"""Name → version → file."""


@dataclass(frozen=True, slots=True)
class House:
    """The home, and packages that can come and go."""

    home: Home
    packages: Packages
    """Of each, the first version is installed at the beginning."""

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of all experts that there are at the beginning."""
        return tuple(str(expert.package) for expert in Store(self.home.store).experts())


def furnish(root: Path, scratch: Path) -> House:
    """Make the home; packages are written below ``scratch``, which must last as long."""
    home = Home(root)
    store, bases, trust = Store(home.store), BaseStore(home.bases), TrustStore(home.trust)
    install_starter(store=store, bases=bases, trust=trust)
    key = PrivateKey.generate("ed25519")
    trust.add(key.public, name=NAMESPACE, namespaces=[NAMESPACE])
    facts = read_base(STARTER / "base")
    drawn = {f"lora-{rank}": _drawn(scratch, rank, facts) for rank in RANKS}
    renamed = {name: _renamed(scratch, name, store) for name in RENAMED}
    packages = {
        f"{NAMESPACE}/{name}": _packages(f"{NAMESPACE}/{name}", folders, facts, key)
        for name, folders in (drawn | renamed).items()
    }
    first = [versions[VERSIONS[0]] for versions in packages.values()]
    install_files(first, store=store, bases=bases, trust=trust)
    return House(home, packages)


def _packages(
    name: str, folders: Mapping[str, Path], facts: BaseFacts, key: PrivateKey
) -> dict[str, Path]:
    packages = {}
    for version, folder in folders.items():
        packages[version] = folder.with_suffix(".expert")
        described = Overrides(name=name, version=version, description=f"a benchmark's {name}")
        build(plan_build(folder, described, base=facts), packages[version], key=key)
    return packages


def _drawn(scratch: Path, rank: int, facts: BaseFacts) -> dict[str, Path]:
    """Write an adapter for each version, with weights of its own."""
    folders = {}
    for number, version in enumerate(VERSIONS):
        folder = folders[version] = scratch / f"lora-{rank}-v{number}"
        folder.mkdir()
        drawn = np.random.default_rng(1000 * number + rank)
        save_file(dict(_tensors(drawn, rank, facts)), folder / WEIGHTS_PATH, {"format": "pt"})
        (folder / CONFIG_PATH).write_text(json.dumps(_lora_config(rank, facts)))
    return folders


def _renamed(scratch: Path, name: str, store: Store) -> dict[str, Path]:
    """Write the same adapter for each version."""
    [expert] = [one for one in store.experts() if str(one.package) == RENAMED[name]]
    folders = {}
    for number, version in enumerate(VERSIONS):
        folder = folders[version] = scratch / f"{name}-v{number}"
        folder.mkdir()
        for path in (WEIGHTS_PATH, CONFIG_PATH):
            (folder / path).write_bytes(store.read(expert, path))
    return folders


def _lora_config(rank: int, facts: BaseFacts) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in _modules(facts)}),
    }


def _modules(facts: BaseFacts) -> dict[str, tuple[int, int]]:
    """Return ``(out, in)`` of the projections of each layer."""
    return {name: shape for name, shape in facts.shapes.items() if name.endswith("_proj")}


def _tensors(
    drawn: np.random.Generator, rank: int, facts: BaseFacts
) -> Iterator[tuple[str, np.ndarray]]:
    for module, (out, into) in _modules(facts).items():
        for part, shape in (("A", (rank, into)), ("B", (out, rank))):
            numbers = (drawn.standard_normal(shape) * SPREAD).astype(np.float16)
            yield f"base_model.model.{module}.lora_{part}.weight", numbers
