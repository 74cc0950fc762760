"""A home to serve from while its experts change: the starter base, and experts of all kinds for it.

In addition to the starter pack there are experts of this benchmark, each in two versions: LoRAs
with random weights, and the starter's DoRA, IA³ and soft prompt under other names.

While a home is served, experts are removed, installed again, and replaced by other versions. Every
change is a separate command, as a user would run it. The times in which a name could not be found
are recorded as intervals.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from expertctl.install.installer import (
    STARTER,
    InstallContext,
    install_files,
    install_starter,
    read_starter_manifest,
)
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.directory import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.draft import ManifestOverrides
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore

NAMESPACE = "soak"
BASE = read_starter_manifest().base.name
VERSIONS = ("1.0.0", "2.0.0")
RANKS = (8, 16, 24, 32)
RENAMED = {"dora": "starter/past", "ia3": "starter/capitals", "soft-prompt": "starter/exclaim"}
"""Experts of this benchmark that have the weights of another one."""
SPREAD = 0.01

Packages = Mapping[str, Mapping[str, Path]]
"""Name → version → file."""


@dataclass(frozen=True, slots=True)
class SoakHome:
    """The home, and packages that can be installed and removed."""

    home: Home
    packages: Packages
    """The first version of each is installed at the beginning."""

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The names of all experts that are present at the beginning."""
        return tuple(str(expert.package) for expert in Store(self.home.store).list_experts())


def make_soak_home(root: Path, scratch: Path) -> SoakHome:
    """Make the home; packages are written below ``scratch``, which must last as long."""
    home = Home(root)
    store, bases, trust = Store(home.store), BaseStore(home.bases), TrustStore(home.trust)
    context = InstallContext(store, bases, trust, home.registries)
    install_starter(context)
    key = PrivateKey.generate("ed25519")
    trust.add(key.public, name=NAMESPACE, namespaces=[NAMESPACE])
    facts = read_base(STARTER / "base")
    drawn = {f"lora-{rank}": _write_random_loras(scratch, rank, facts) for rank in RANKS}
    renamed = {name: _write_renamed(scratch, name, store) for name in RENAMED}
    packages = {
        f"{NAMESPACE}/{name}": _write_packages(f"{NAMESPACE}/{name}", folders, facts, key)
        for name, folders in (drawn | renamed).items()
    }
    first = [versions[VERSIONS[0]] for versions in packages.values()]
    install_files(first, context)
    return SoakHome(home, packages)


def _write_packages(
    name: str, folders: Mapping[str, Path], facts: BaseFacts, key: PrivateKey
) -> dict[str, Path]:
    packages = {}
    for version, folder in folders.items():
        packages[version] = folder.with_suffix(".expert")
        described = ManifestOverrides(
            name=name, version=version, description=f"a benchmark's {name}"
        )
        build_package(plan_build(folder, described, base=facts), packages[version], key=key)
    return packages


def _write_random_loras(scratch: Path, rank: int, facts: BaseFacts) -> dict[str, Path]:
    """Write an adapter for each version, with different weights."""
    folders = {}
    for number, version in enumerate(VERSIONS):
        folder = folders[version] = scratch / f"lora-{rank}-v{number}"
        folder.mkdir()
        drawn = np.random.default_rng(1000 * number + rank)
        save_file(dict(_make_tensors(drawn, rank, facts)), folder / WEIGHTS_PATH, {"format": "pt"})
        (folder / CONFIG_PATH).write_text(json.dumps(_make_lora_config(rank, facts)))
    return folders


def _write_renamed(scratch: Path, name: str, store: Store) -> dict[str, Path]:
    """Write the same adapter for each version."""
    [expert] = [one for one in store.list_experts() if str(one.package) == RENAMED[name]]
    folders = {}
    for number, version in enumerate(VERSIONS):
        folder = folders[version] = scratch / f"{name}-v{number}"
        folder.mkdir()
        for path in (WEIGHTS_PATH, CONFIG_PATH):
            (folder / path).write_bytes(store.read(expert, path))
    return folders


def _make_lora_config(rank: int, facts: BaseFacts) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in _list_modules(facts)}),
    }


def _list_modules(facts: BaseFacts) -> dict[str, tuple[int, int]]:
    """Return ``(out, in)`` of the projections of each layer."""
    return {name: shape for name, shape in facts.shapes.items() if name.endswith("_proj")}


def _make_tensors(
    drawn: np.random.Generator, rank: int, facts: BaseFacts
) -> Iterator[tuple[str, np.ndarray]]:
    for module, (out, into) in _list_modules(facts).items():
        for part, shape in (("A", (rank, into)), ("B", (out, rank))):
            numbers = (drawn.standard_normal(shape) * SPREAD).astype(np.float16)
            yield f"base_model.model.{module}.lora_{part}.weight", numbers


EXPERTCTL = str(Path(sys.executable).with_name("expertctl"))
EVERY_SECONDS = 20.0
GC_EVERY = 5
"""After this many changes, garbage is collected."""
GRACE_SECONDS = 2.0
"""Maximum time until a server notices that an expert was installed again."""


@dataclass(slots=True)
class Absence:
    """The interval in which an expert was absent; replacing it by another version counts, too."""

    name: str
    started: float
    ended: float = float("inf")

    def overlaps(self, *, started: float, ended: float) -> bool:
        """Return whether it was absent at any moment of a request."""
        return self.started <= ended and started <= self.ended + GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class HomeChange:
    """One command and its outcome."""

    words: tuple[str, ...]
    at: float
    code: int
    output: str


class HomeChurn:
    """Changes one home, one command after the other."""

    def __init__(self, user_home: SoakHome, *, seed: int) -> None:
        """Begin with the first version of everything installed."""
        self.changes = list[HomeChange]()
        self.away = list[Absence]()
        self._house, self._drawn = user_home, random.Random(seed)  # what changes is no secret
        self._ended = asyncio.Event()
        self._versions: dict[str, str | None] = dict.fromkeys(user_home.packages, VERSIONS[0])

    async def run(self) -> None:
        """Change something at intervals, until `stop`."""
        self._ended.clear()
        for number in count(1):
            with suppress(TimeoutError):
                pause = EVERY_SECONDS * self._drawn.uniform(0.5, 1.5)
                await asyncio.wait_for(self._ended.wait(), pause)
                return
            gone = [name for name, version in self._versions.items() if version is None]
            await self._change(self._drawn.choice(gone or list(self._versions)))
            if number % GC_EVERY == 0:
                await self._run_command("gc")

    def stop(self) -> None:
        """Make `run` return after the current change."""
        self._ended.set()

    async def restore(self) -> None:
        """Install what is absent."""
        for name, version in self._versions.items():
            if version is None:
                await self._install(name, VERSIONS[0])

    async def _change(self, name: str) -> None:
        version = self._versions[name]
        other = VERSIONS[1 - VERSIONS.index(version or VERSIONS[0])]
        if version is None:
            await self._install(name, other)
        elif self._drawn.random() < 0.5:
            await self._remove(name, version)
        else:
            await self._run_command("install", str(self._house.packages[name][other]))
            self.away.append(Absence(name, time.monotonic()))
            await self._run_command("remove", f"{name}@{version}")
            self.away[-1].ended = time.monotonic()
            self._versions[name] = other

    async def _install(self, name: str, version: str) -> None:
        await self._run_command("install", str(self._house.packages[name][version]))
        for span in self.away:
            if span.name == name:
                span.ended = min(span.ended, time.monotonic())
        self._versions[name] = version

    async def _remove(self, name: str, version: str) -> None:
        self.away.append(Absence(name, time.monotonic()))
        self._versions[name] = None
        await self._run_command("remove", f"{name}@{version}")

    async def _run_command(self, *words: str) -> None:
        at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(EXPERTCTL, *words, "--json"),
            env={**os.environ, "EXPERT_HOME": str(self._house.home.root)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert process.returncode is not None
        self.changes.append(
            HomeChange(words, at, process.returncode, said.decode(errors="replace"))
        )
