"""Small signed packages on one tiny base, made once, and a home to install them in.

Makes runs and gains to be remembered.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from expertctl.digest import Digest, ignore_progress
from expertctl.install.installer import InstallContext, install_files
from expertctl.install.publication import InstalledPackage
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.read import PackageContents, VerifiedPackage, read_package
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.refs import LOCAL
from expertctl.store.run_record import PairGain, RunRecord, UsedExpert
from expertctl.store.store import Store
from expertctl.store.transaction import AddResult, PackageStaging
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.factories import make_package, write_base

BASE_NAME = "tiny-base"
TARGETS = ("q_proj",)


@cache
def make_key(name: str) -> PrivateKey:
    return PrivateKey.generate("ed25519")


@dataclass(frozen=True)
class PackageFactory:
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
                key=None if key is None else make_key(key),
                output=file,
                lora={"targets": TARGETS, "seed": seed, "rank": 2},
                **manifest,
            )
        return file

    def read_contents(
        self, name: str, version: str, *, key: str | None, seed: int
    ) -> PackageContents:
        """What `package` of the same arguments holds."""
        return _read_contents(self.package(name, version, key=key, seed=seed))


@cache
def _read_contents(file: Path) -> PackageContents:
    return read_package(file)


@dataclass(frozen=True)
class HomeFixture:
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

    def trust_keys(self, *keys: str) -> "HomeFixture":
        for key in keys:
            self.trust.add(make_key(key).public, name=key, namespaces=["acme", "local"])
        return self

    def install(self, *paths: Path, **options: Any) -> list[InstalledPackage]:
        progress = options.pop("progress", ignore_progress)
        return install_files(paths, self.context(**options), progress=progress)

    def context(self, **options: Any) -> InstallContext:
        return InstallContext(self.store, self.bases, self.trust, self.home.registries, **options)

    def refs(self) -> list[str]:
        return [expert.ref for expert in self.store.list_experts()]

    def read_files(self) -> dict[str, bytes]:
        """Every file of the store but locks, by its path."""
        root = self.home.store
        paths = [p for p in root.rglob("*") if p.is_file() and p.name != "lock"]
        return {str(p.relative_to(root)): p.read_bytes() for p in paths}

    def check_integrity(self) -> None:
        """The promises of every owner, and no blob that nothing needs."""
        self.store.check_integrity()
        self.bases.check_integrity()
        self.catalogue.check_integrity()
        self.index.check_integrity()


@pytest.fixture(scope="session")
def package_factory(tmp_path_factory: pytest.TempPathFactory) -> PackageFactory:
    folder = tmp_path_factory.mktemp("shop")
    base_dir = write_base(folder / BASE_NAME, layers=1, hidden=16, heads=2, kv_heads=1)
    return PackageFactory(folder, base_dir, read_base(base_dir))


@pytest.fixture
def user_home(home: Path) -> HomeFixture:
    return HomeFixture(home).trust_keys("acme")


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of flushes cost nothing there."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent, prefix="expertctl-") as folder:
        yield Path(folder)


EXPERT_X, EXPERT_Y = (
    UsedExpert("acme/x@1.0.0", Digest.compute(b"x")),
    UsedExpert("acme/y@1.0.0", Digest.compute(b"y")),
)
NOW = 1_800_000_000.0
DAY = 86_400.0


def make_run(number: int, *experts: UsedExpert, alone: bool = False, **fields: object) -> RunRecord:
    """A run of X, or of other experts; the same number gives the same id."""
    plain = RunRecord(
        job_id=Digest.compute(str(number).encode()).hex[:32],
        at=NOW,
        task="default",
        base="base",
        experts=() if alone else experts or (EXPERT_X,),
        finish_reason="stop",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of a job


def record_use(catalogue: Catalogue, digest: Digest) -> bool:
    """Record a run of one expert, with an id of its own."""
    run = make_run(0, UsedExpert("acme/sql@1.0.0", digest), job_id=uuid4().hex)
    return catalogue.history.record_run(run)


def publish(
    store: Store, package: VerifiedPackage, staging: PackageStaging, *, registry: str = LOCAL
) -> AddResult:
    """Publish one package without any check against others, and free what it replaces."""
    with store.begin_transaction() as changes:
        added = changes.publish(package, staging, registry=registry)
        if added.superseded:
            changes.free_blobs(added.superseded)
    return added


def make_gain(**fields: object) -> PairGain:
    """A gain of X and Y together that is sure."""
    plain = PairGain(
        first=EXPERT_X.content_digest,
        second=EXPERT_Y.content_digest,
        base="base",
        gain=0.2,
        low=0.1,
        high=0.3,
        p=0.001,
        n=100,
        at=1.0,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of a gain
