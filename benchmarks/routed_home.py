"""A home with the starter pack, and experts in memory beside it, to route prompts in.

Prompts go through `Planner`, as those of every command do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from expertctl.digest import Digest
from expertctl.install.starter import install_starter
from expertctl.reference import PackageName
from expertctl.routing.candidate import Installed
from expertctl.routing.planner import Inventory, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.roster import Roster
from expertctl.schema.manifest import Composition, Routing
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore

Choose = Callable[[str], tuple[str, ...]]
"""A prompt → the names of the experts that answer it."""


@dataclass(frozen=True, slots=True)
class Described:
    """An expert that is only described: nothing of it is ever loaded."""

    name: str
    description: str
    keywords: tuple[str, ...]
    examples: tuple[str, ...]

    @classmethod
    def of(cls, expert: Installed) -> Self:
        """Describe an installed expert."""
        manifest = expert.manifest
        routing = manifest.routing
        return cls(manifest.name, manifest.description, routing.keywords, routing.examples)


def furnish(root: Path) -> Home:
    """Install the starter pack below a folder."""
    home = Home(root)
    install_starter(
        store=Store(home.store), bases=BaseStore(home.bases), trust=TrustStore(home.trust)
    )
    return home


def starter_experts(home: Home) -> tuple[Installed, ...]:
    """Return the experts of the starter pack."""
    return Planner.open(Settings(home, encoder="lexical")).inventory().experts


def made_up(described: Sequence[Described], like: Installed) -> tuple[Installed, ...]:
    """Return experts that fit the base of another one, with the same signer."""
    return tuple(_made_up(each, like) for each in described)


def chooser(home: Home, encoder: str, experts: Sequence[Installed]) -> Choose:
    """Return what routes prompts to these experts, with an encoder by its name."""
    return choosing(Planner.open(Settings(home, encoder=encoder)), experts)


def choosing(planner: Planner, experts: Sequence[Installed]) -> Choose:
    """Return what routes prompts to these experts, of which only vectors are kept."""
    inventory = Inventory(tuple(experts), (), ())
    made: dict[str, Roster] = {}

    def once(request: RouteRequest, base: StoredBase, experts: Sequence[Installed]) -> Roster:
        return made.get(base.name) or made.setdefault(
            base.name, planner.roster(request, base, experts)
        )

    def choose(prompt: str) -> tuple[str, ...]:
        request = RouteRequest(prompt=prompt)
        plan = planner.plan_from(inventory, request, roster=once).result.plan
        return tuple(expert.ref.partition("@")[0] for expert in plan.experts)

    return choose


def _made_up(described: Described, like: Installed) -> Installed:
    routing = Routing(examples=described.examples, keywords=described.keywords)
    manifest = replace(
        like.manifest,
        name=described.name,
        description=described.description,
        tags=(),
        routing=routing,
        composition=Composition(),
    )
    stored = replace(
        like.stored,
        package=PackageName.parse(described.name),
        content_digest=Digest.of(repr(described).encode()),
        package_digest=Digest.of(described.name.encode()),
    )
    return Installed(stored, manifest)
