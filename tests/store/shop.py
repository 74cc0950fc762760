"""Small signed packages on one tiny base, made once, and a home to install them in."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expertctl.install.install import install_files
from expertctl.install.publication import Installed
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.read import PackageContents, read_package
from expertctl.routing.index import RoutingIndex
from expertctl.routing.lexical import LexicalEncoder
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from expertctl.trust.policy import TrustStore
from tests.factories import make_package, write_base

BASE_NAME = "tiny-base"
TARGETS = ("q_proj",)


@cache
def a_key(name: str) -> PrivateKey:
    return PrivateKey.generate("ed25519")


@dataclass(frozen=True)
class Shop:
    """Makes packages; the same arguments give the same file."""

    folder: Path
    base_dir: Path
    base: BaseFacts

    def package(
        self,
        name: str = "acme/sql",
        version: str = "1.0.0",
        *,
        key: str | None = "acme",
        seed: int = 0,
        base_dir: Path | None = None,
        base: BaseFacts | None = None,
        **manifest: Any,
    ) -> Path:
        """A package signed with the key of that name; ``seed`` decides its weights."""
        identity = repr(base and base.identity)
        words = (name, version, key, seed, base_dir, identity, repr(sorted(manifest.items())))
        folder = self.folder / str(abs(hash(words)))
        file = folder / "package.expert"
        if not file.exists():
            folder.mkdir()
            make_package(
                folder,
                name,
                version,
                base_dir=base_dir or self.base_dir,
                base=base or (self.base if base_dir is None else None),
                key=None if key is None else a_key(key),
                output=file,
                lora={"targets": TARGETS, "seed": seed, "rank": 2},
                **manifest,
            )
        return file

    def contents(self, name: str, version: str, *, key: str | None, seed: int) -> PackageContents:
        """What `package` of the same arguments holds."""
        return _contents(self.package(name, version, key=key, seed=seed))


@cache
def _contents(file: Path) -> PackageContents:
    return read_package(file)


@dataclass(frozen=True)
class House:
    """One EXPERT_HOME and the owners in it."""

    root: Path

    @property
    def home(self) -> Home:
        return Home(self.root)

    @property
    def store(self) -> Store:
        return Store(self.home.store)

    @property
    def bases(self) -> BaseStore:
        return BaseStore(self.home.bases)

    @property
    def trust(self) -> TrustStore:
        return TrustStore(self.home.trust)

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.home.index)

    @property
    def index(self) -> RoutingIndex:
        return RoutingIndex(self.root, LexicalEncoder())

    def trusting(self, *keys: str) -> "House":
        for key in keys:
            self.trust.add(a_key(key).public, name=key, namespaces=["acme", "local"])
        return self

    def install(self, *paths: Path, **options: Any) -> list[Installed]:
        return install_files(paths, store=self.store, bases=self.bases, trust=self.trust, **options)

    def refs(self) -> list[str]:
        return [expert.ref for expert in self.store.experts()]

    def files(self) -> dict[str, bytes]:
        """Every file of the store but locks, by its path."""
        root = self.home.store
        paths = [p for p in root.rglob("*") if p.is_file() and p.name != "lock"]
        return {str(p.relative_to(root)): p.read_bytes() for p in paths}

    def check(self) -> None:
        """The promises of every owner, and no blob that nothing needs."""
        self.store.check_integrity()
        self.bases.check_integrity()
        self.catalogue.check_integrity()
        self.index.check_integrity()


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    base_dir = write_base(folder / BASE_NAME, layers=1, hidden=16, heads=2, kv_heads=1)
    return Shop(folder, base_dir, read_base(base_dir))


@pytest.fixture
def house(home: Path) -> House:
    return House(home).trusting("acme")


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of flushes cost nothing there."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent, prefix="expertctl-") as folder:
        yield Path(folder)
