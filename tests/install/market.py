"""A live registry with small packages in it, and houses that install from it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from expertctl.digest import Progress, no_progress
from expertctl.install.disagreement import Need
from expertctl.install.order import Done, Order, Target, install_order
from expertctl.install.sources import open_sources
from expertctl.reference import PackageName, Reference
from expertctl.settings import Settings
from expertctl.store.store import Store
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.publishing.keys import add_key, revoke_key
from registry_server.publishing.yank import yank
from tests.registry.live import Live, as_it_is, live_registry
from tests.registry_server.publishing.parcels import Parcel, Template, make_template, push
from tests.store.shop import House, a_key


@dataclass
class Market:
    """One registry, whose namespaces belong to alice, and who publishes there."""

    live: Live
    template: Template
    identity: Identity
    sold: dict[str, Parcel] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.live.host

    @property
    def known(self) -> KnownRegistry:
        return KnownRegistry(self.host, self.live.url, self.live.served.registry.index_key.public)

    def open(self, namespace: str, *, key: PrivateKey | None = None) -> "Market":
        """Make a namespace that everybody may read; alice's key may sign it."""
        self.live.served.namespace(namespace, kind="expert", read="public", owner="alice")
        return self.accept(namespace, key or a_key("acme"))

    def accept(
        self, namespace: str, key: PrivateKey, *, statement: bytes | None = None
    ) -> "Market":
        """Let a key sign a namespace."""
        add_key(
            self.live.served.registry,
            self.identity,
            namespace=namespace,
            public_key=key.public.pem(),
            statement=statement,
        )
        return self

    def sell(
        self,
        ref: str,
        *,
        requires: Sequence[str] = (),
        conflicts: Sequence[str] = (),
        key: PrivateKey | None = None,
        **changes: Any,
    ) -> Parcel:
        """Publish a version."""
        name, version = ref.split("@")
        composition = {"requires": list(requires), "conflicts": list(conflicts)}
        parcel = self.template.parcel(
            name, version, key=key or a_key("acme"), composition=composition, **changes
        )
        push(self.live.served.registry, self.identity, parcel)
        self.sold[ref] = parcel
        return parcel

    def yank(self, ref: str, reason: str = "") -> None:
        name, version = ref.split("@")
        package = PackageName.parse(name)
        registry = self.live.served.registry
        yank(registry, self.identity, name=package, version=version, reason=reason)

    def revoke(self, namespace: str, key: PrivateKey, reason: str = "lost") -> None:
        registry = self.live.served.registry
        key_id = key.public.key_id
        revoke_key(registry, self.identity, namespace=namespace, key_id=key_id, reason=reason)


@dataclass(frozen=True)
class Buyer:
    """A house that knows a registry and installs from it."""

    house: House
    settings: Settings

    @classmethod
    def at(cls, root: Path, *markets: Market) -> "Buyer":
        """A new house whose default registry is the first of these; it knows all of them."""
        house = House(root)
        for market in markets:
            house.trust.add_registry(market.known)
        default = markets[0].host if markets else None
        return cls(house, Settings(house.home, registry=default))

    def offline(self) -> "Buyer":
        return replace(self, settings=replace(self.settings, offline=True))

    @property
    def store(self) -> Store:
        return self.house.store

    @property
    def target(self) -> Target:
        house = self.house
        return Target(
            house.store,
            house.bases,
            house.trust,
            house.home.registries,
            catalogue=house.catalogue,
            index=house.index,
        )

    def buy(self, *refs: str, files: Sequence[Path] = (), **order: Any) -> Done:
        """Install what a person types."""
        needs = tuple(Need(Reference.parse(ref), "you", by_hand=True) for ref in refs)
        with open_sources(self.settings, self.house.trust) as sources:
            wanted = Order(needs, tuple(files), **order)
            return install_order(wanted, self.target, sources, lend)

    def refs(self) -> list[str]:
        return self.house.refs()


@contextmanager
def lend(total: int) -> Iterator[Progress]:
    yield no_progress


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@contextmanager
def market_at(
    folder: Path, template: Template, *, around: Callable[[ASGIApp], ASGIApp] = as_it_is
) -> Iterator[Market]:
    """Run a registry with one user."""
    with live_registry(folder, around=around) as live:
        identity = live.served.identity(live.served.user("alice"))
        yield Market(live, template, identity)


@pytest.fixture
def market(tmp_path: Path, template: Template) -> Iterator[Market]:
    """A registry with the namespace acme."""
    with market_at(tmp_path / "registry", template) as running:
        yield running.open("acme")


@pytest.fixture
def buyer(home: Path, market: Market) -> Buyer:
    return Buyer.at(home, market)
