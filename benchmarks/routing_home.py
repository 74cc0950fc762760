"""A home with the starter pack, and additional experts in memory, to route prompts in.

Prompts go through `Planner`, as those of every command do. An encoder with a cache is for
experiments that encode the same texts repeatedly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from expertctl.digest import Digest
from expertctl.install.installer import InstallContext, install_starter
from expertctl.reference import PackageName
from expertctl.routing.candidate import EligibleExperts, InstalledExpert
from expertctl.routing.encoder import Encoder
from expertctl.routing.planner import Inventory, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.vector_table import EncodedTexts, Vectors
from expertctl.schema.manifest import CompositionRules, Routing
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

RoutePrompt = Callable[[str], tuple[str, ...]]
"""Returns the names of the experts that answer a prompt."""


@dataclass(frozen=True, slots=True)
class DescribedExpert:
    """An expert that has only a manifest: nothing of it is ever loaded."""

    name: str
    description: str
    keywords: tuple[str, ...]
    examples: tuple[str, ...]

    @classmethod
    def of(cls, expert: InstalledExpert) -> Self:
        """Describe an installed expert."""
        manifest = expert.manifest
        routing = manifest.routing
        return cls(manifest.name, manifest.description, routing.keywords, routing.examples)


def make_home(root: Path) -> Home:
    """Install the starter pack below a folder."""
    home = Home(root)
    stores = Store(home.store), BaseStore(home.bases), TrustStore(home.trust)
    install_starter(InstallContext(*stores, home.registries))
    return home


def list_starter_experts(home: Home) -> tuple[InstalledExpert, ...]:
    """Return the experts of the starter pack."""
    return Planner.open(Settings(home, encoder="lexical")).read_inventory().experts


def make_experts(
    described: Sequence[DescribedExpert], like: InstalledExpert
) -> tuple[InstalledExpert, ...]:
    """Return experts for the base of another one, with the same signer."""
    return tuple(_make_expert(each, like) for each in described)


def open_router(home: Home, encoder: str, experts: Sequence[InstalledExpert]) -> RoutePrompt:
    """Return a function that routes prompts to these experts, with the named encoder."""
    return make_router(Planner.open(Settings(home, encoder=encoder)), experts)


def make_router(planner: Planner, experts: Sequence[InstalledExpert]) -> RoutePrompt:
    """Return a function that routes prompts to these experts; only their vectors are stored."""
    inventory = Inventory(tuple(experts), (), ())
    made: dict[str, EligibleExperts] = {}

    def once(
        request: RouteRequest, base: StoredBase, experts: Sequence[InstalledExpert]
    ) -> EligibleExperts:
        return made.get(base.name) or made.setdefault(
            base.name, planner.find_eligible(request, base, experts)
        )

    def choose(prompt: str) -> tuple[str, ...]:
        request = RouteRequest(prompt=prompt)
        plan = planner.plan_with_inventory(inventory, request, eligibility=once).result.plan
        return tuple(expert.ref.partition("@")[0] for expert in plan.experts)

    return choose


def _make_expert(described: DescribedExpert, like: InstalledExpert) -> InstalledExpert:
    routing = Routing(examples=described.examples, keywords=described.keywords)
    manifest = replace(
        like.manifest,
        name=described.name,
        description=described.description,
        tags=(),
        routing=routing,
        composition=CompositionRules(),
    )
    stored = replace(
        like.stored,
        package=PackageName.parse(described.name),
        content_digest=Digest.compute(repr(described).encode()),
        package_digest=Digest.compute(described.name.encode()),
    )
    return InstalledExpert(stored, manifest)


class MemoisingEncoder:
    """An encoder that encodes every text once."""

    def __init__(self, encoder: Encoder) -> None:
        """Wrap an encoder."""
        self.encoder = encoder
        self.name = encoder.name
        self.dimensions = encoder.dimensions
        self.rerank_dimensions = encoder.rerank_dimensions
        self.stamp = encoder.stamp
        self._digest = encoder.digest()
        self._known: dict[str, tuple[Vectors, Vectors]] = {}

    def digest(self) -> Digest:
        """Return the digest of the encoder."""
        return self._digest

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""
        return self.encode_for_rerank(texts).rows

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Return rows and rerank rows."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            encoded = self.encoder.encode_for_rerank(new)
            self._known |= zip(
                new, zip(encoded.rows, encoded.rerank_rows, strict=True), strict=True
            )
        rows, deep = zip(*(self._known[text] for text in texts), strict=True)
        return EncodedTexts(np.stack(rows), np.stack(deep))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map cosines as the encoder does."""
        return self.encoder.calibrate(cosines)
