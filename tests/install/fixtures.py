"""A live registry with small packages in it, and houses that install from it.

A project in a folder, and a person who works in it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from expertctl.digest import Progress, ignore_progress
from expertctl.install.candidate import ReleaseAge, Requirement
from expertctl.install.installer import InstallContext
from expertctl.install.outdated import OutdatedEntry, find_outdated
from expertctl.install.request import InstallReport, InstallRequest, install_request
from expertctl.install.requirement_list import (
    RequirementList,
    find_requirement_list,
    install_locked,
    install_requirement_list,
    lock_requirement_list,
    resolve_requirement_list,
)
from expertctl.install.sources import open_sources
from expertctl.reference import PackageName, Reference
from expertctl.settings import Settings
from expertctl.store.store import Store
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.publishing.releases import add_key, revoke_key, yank_release
from tests.registry.live_registry import LiveRegistry, add_no_middleware, run_live_registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
    upload_and_publish,
)
from tests.store.fixtures import HomeFixture, make_key


@dataclass
class PublishingRegistry:
    """One registry, whose namespaces belong to alice, and who publishes there."""

    live: LiveRegistry
    template: PackageTemplate
    identity: Identity
    published: dict[str, InMemoryPackage] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.live.host

    @property
    def known(self) -> KnownRegistry:
        return KnownRegistry(self.host, self.live.url, self.live.served.registry.index_key.public)

    def create_namespace(
        self, namespace: str, *, key: PrivateKey | None = None
    ) -> "PublishingRegistry":
        """Make a namespace that everybody may read; alice's key may sign it."""
        self.live.served.create_namespace(namespace, kind="expert", read="public", owner="alice")
        return self.accept_key(namespace, key or make_key("acme"))

    def accept_key(
        self, namespace: str, key: PrivateKey, *, statement: bytes | None = None
    ) -> "PublishingRegistry":
        """Let a key sign a namespace."""
        add_key(
            self.live.served.registry,
            self.identity,
            namespace=namespace,
            public_key=key.public.pem(),
            statement=statement,
        )
        return self

    def publish(
        self,
        ref: str,
        *,
        requires: Sequence[str] = (),
        conflicts: Sequence[str] = (),
        key: PrivateKey | None = None,
        **changes: Any,
    ) -> InMemoryPackage:
        """Publish a version."""
        name, version = ref.split("@")
        composition = {"requires": list(requires), "conflicts": list(conflicts)}
        parcel = self.template.make_package(
            name, version, key=key or make_key("acme"), composition=composition, **changes
        )
        upload_and_publish(self.live.served.registry, self.identity, parcel)
        self.published[ref] = parcel
        return parcel

    def yank(self, ref: str, reason: str = "") -> None:
        name, version = ref.split("@")
        package = PackageName.parse(name)
        registry = self.live.served.registry
        yank_release(registry, self.identity, name=package, version=version, reason=reason)

    def revoke(self, namespace: str, key: PrivateKey, reason: str = "lost") -> None:
        registry = self.live.served.registry
        key_id = key.public.key_id
        revoke_key(registry, self.identity, namespace=namespace, key_id=key_id, reason=reason)


@dataclass(frozen=True)
class InstallClient:
    """A house that knows a registry and installs from it."""

    user_home: HomeFixture
    settings: Settings

    @classmethod
    def create(cls, root: Path, *registries: PublishingRegistry) -> "InstallClient":
        """A new house whose default registry is the first of these; it knows all of them."""
        user_home = HomeFixture(root)
        for publisher in registries:
            user_home.trust.add_registry(publisher.known)
        default = registries[0].host if registries else None
        return cls(user_home, Settings(user_home.home, registry=default))

    def offline(self) -> "InstallClient":
        return replace(self, settings=replace(self.settings, offline=True))

    @property
    def store(self) -> Store:
        return self.user_home.store

    @property
    def context(self) -> InstallContext:
        user_home = self.user_home
        return InstallContext(
            user_home.store,
            user_home.bases,
            user_home.trust,
            user_home.home.registries,
            catalogue=user_home.catalogue,
            index=user_home.index,
        )

    def install(self, *refs: str, files: Sequence[Path] = (), **options: Any) -> InstallReport:
        """Install what a person types."""
        needs = tuple(Requirement(Reference.parse(ref), "you", by_hand=True) for ref in refs)
        with open_sources(self.settings, self.user_home.trust) as sources:
            wanted = InstallRequest(needs, tuple(files), **options)
            return install_request(wanted, self.context, sources, open_silent_progress)

    def refs(self) -> list[str]:
        return self.user_home.refs()


@contextmanager
def open_silent_progress(total: int) -> Iterator[Progress]:
    yield ignore_progress


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@contextmanager
def run_publishing_registry(
    folder: Path,
    template: PackageTemplate,
    *,
    middleware: Callable[[ASGIApp], ASGIApp] = add_no_middleware,
) -> Iterator[PublishingRegistry]:
    """Run a registry with one user."""
    with run_live_registry(folder, middleware=middleware) as live:
        identity = live.served.authenticate(live.served.create_user("alice"))
        yield PublishingRegistry(live, template, identity)


@pytest.fixture
def publisher(tmp_path: Path, template: PackageTemplate) -> Iterator[PublishingRegistry]:
    """A registry with the namespace acme."""
    with run_publishing_registry(tmp_path / "registry", template) as running:
        yield running.create_namespace("acme")


@pytest.fixture
def buyer(home: Path, publisher: PublishingRegistry) -> InstallClient:
    return InstallClient.create(home, publisher)


RELEASE_AGE = ReleaseAge()


class ProjectFixture:
    """A project, and people who work in it."""

    def __init__(self, folder: Path, buyer: InstallClient) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.client = buyer

    @property
    def requirements(self) -> RequirementList:
        return find_requirement_list(self.client.user_home.home, self.folder)

    @property
    def lock_path(self) -> Path:
        return self.folder / "expert.lock"

    def write_project(self, text: str) -> "ProjectFixture":
        (self.folder / "experts.toml").write_text(text)
        return self

    def lock(self) -> list[str]:
        with open_sources(self.client.settings, self.client.user_home.trust) as sources:
            resolved = resolve_requirement_list(
                self.requirements, self.client.context, sources, RELEASE_AGE
            )
            return lock_requirement_list(self.requirements, resolved)[0]

    def install(self, *fresh: str, everything: bool = False) -> tuple[InstallReport, list[str]]:
        names = None if everything else [PackageName.parse(text) for text in fresh]
        with open_sources(self.client.settings, self.client.user_home.trust) as sources:
            return install_requirement_list(
                self.requirements,
                self.client.context,
                sources,
                open_silent_progress,
                RELEASE_AGE,
                fresh=names,
            )

    def install_locked(self, *refs: str) -> InstallReport:
        wanted = [Reference.parse(text) for text in refs]
        with open_sources(self.client.settings, self.client.user_home.trust) as sources:
            return install_locked(
                self.requirements, wanted, self.client.context, sources, open_silent_progress
            )

    def outdated(self) -> list[OutdatedEntry]:
        with open_sources(self.client.settings, self.client.user_home.trust) as sources:
            return find_outdated(self.requirements, self.client.context, sources, RELEASE_AGE)

    def with_client(self, buyer: InstallClient) -> "ProjectFixture":
        """The same project in the hands of somebody else."""
        return ProjectFixture(self.folder, buyer)
