"""A registry's honest and hostile moves against a client, with plain sets as the oracle."""

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from expertctl.errors import RevokedError, TrustError
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, KeyEntry, sign_index
from expertctl.registry.index_store import IndexStore
from expertctl.registry.registry_trust import find_signer_problem, pin_verified_keys
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.trust_store import TrustStore
from tests.registry.indexes import (
    compute_named_key_id,
    make_index_document,
    make_key_entry,
    make_known_registry,
    make_named_key,
    make_release,
)

pytestmark = pytest.mark.all

HOSTS = ("127.0.0.1:8001", "127.0.0.1:8002")
NAMES = ("a", "b", "c", "d")
NAMESPACES = ("acme", "zoo")
Place = tuple[str, str]
places = st.tuples(st.sampled_from(HOSTS), st.sampled_from(NAMESPACES))
people = st.sampled_from(NAMES)


@dataclass
class ClientModel:
    """What a client should believe of one namespace of one registry."""

    revision: int = 0
    pinned: set[str] = field(default_factory=set)
    was_pinned: bool = False
    revoked: set[str] = field(default_factory=set)

    def learn(
        self,
        words: dict[str, str | None],
        revoked: Iterable[str],
        *,
        mine: set[str],
        gone: set[str],
    ) -> None:
        """Follow an index: ``words`` says of each key who vouches for it."""
        self.revoked |= set(revoked)
        usable = {n: by for n, by in words.items() if n not in self.revoked | gone and by != n}
        if not self.was_pinned:
            self.pinned |= set(words) - self.revoked - gone
        else:
            counting = (self.pinned | mine) - self.revoked - gone
            while more := {n for n, by in usable.items() if by in counting} - counting:
                counting |= more
            self.pinned |= counting & set(usable)
        self.was_pinned = self.was_pinned or bool(self.pinned)

    def counts(self, name: str, mine: set[str]) -> bool:
        return name in (self.pinned | mine) - self.revoked


class RegistriesAndAClient(RuleBasedStateMachine):
    """Registries say what they like; the client believes what the rules of pinning allow."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.trust = TrustStore(self.folder / "trust.json")
        self.store = IndexStore(self.folder / "registries")
        self.model: dict[Place, ClientModel] = {
            (h, n): ClientModel() for h in HOSTS for n in NAMESPACES
        }
        self.mine: set[tuple[str, str]] = set()
        self.gone: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def accept_registries(self) -> None:
        for host in HOSTS:
            self.trust.add_registry(self.registry(host))

    def registry(self, host: str) -> KnownRegistry:
        return make_known_registry(host, index_key=f"index of {host}")

    def trusted_by_me(self, namespace: str) -> set[str]:
        return {name for name, where in self.mine if where == namespace} - self.gone

    def say(self, place: Place, document: IndexDocument, *, signer: str | None = None) -> None:
        """Let a registry show a document; raises what the client makes of it."""
        host, namespace = place
        package = PackageName(namespace, "sql")
        envelope = sign_index(document, make_named_key(signer or f"index of {host}"))
        floor = self.store.load(self.registry(host), package)
        believed = self.store.accept(self.registry(host), package, envelope, floor=floor)
        pin_verified_keys([(believed, self.registry(host))], self.trust, lambda record: record)

    def document(
        self,
        place: Place,
        revision: int,
        words: dict[str, str | None],
        revoked: Iterable[str] = (),
    ) -> IndexDocument:
        _, namespace = place
        keys: list[KeyEntry] = [
            make_key_entry(name, endorsed_by=by, namespace=namespace)
            for name, by in sorted(words.items())
        ]
        made = make_index_document(
            revision, keys=keys or [make_key_entry("nobody")], revoked=sorted(revoked),
            package=PackageName(namespace, "sql"),
        )  # fmt: skip
        return made if keys else _without_keys(made)

    @rule(
        place=places,
        words=st.dictionaries(people, st.none() | people, max_size=4),
        revoked=st.sets(people, max_size=1),
    )
    def publish_anything(
        self, place: Place, words: dict[str, str | None], revoked: set[str]
    ) -> None:
        model = self.model[place]
        model.revision += 1
        self.say(place, self.document(place, model.revision, words, revoked))
        model.learn(words, revoked, mine=self.trusted_by_me(place[1]), gone=self.gone)

    @precondition(lambda self: any(m.revision > 1 for m in self.model.values()))
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([p for p, m in self.model.items() if m.revision > 1]))
        older = data.draw(st.integers(1, self.model[place].revision - 1))
        self.refused(place, self.document(place, older, {"d": None}))

    @precondition(lambda self: any(m.revision for m in self.model.values()))
    @rule(data=st.data())
    def say_another_thing_under_one_revision(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([p for p, m in self.model.items() if m.revision]))
        ring: dict[str, str | None] = {"a": "b", "b": "c", "c": "d", "d": "a"}
        self.refused(place, self.document(place, self.model[place].revision, ring, NAMES))

    @rule(place=places, signer=st.sampled_from(["mallory", *(f"index of {h}" for h in HOSTS)]))
    def sign_with_another_key(self, place: Place, signer: str) -> None:
        if signer != f"index of {place[0]}":
            document = self.document(place, self.model[place].revision + 1, {"d": None})
            self.refused(place, document, signer=signer)

    @rule(place=places, namespace=st.sampled_from(NAMESPACES))
    def show_the_index_of_another_package(self, place: Place, namespace: str) -> None:
        if namespace != place[1]:
            other = self.document((place[0], namespace), 99, {"d": None})
            self.refused(place, other)

    @rule(name=people, namespace=st.sampled_from(NAMESPACES))
    def trust_a_key_myself(self, name: str, namespace: str) -> None:
        if name not in self.gone:
            self.trust.add(make_named_key(name).public, name=name, namespaces=[namespace])
            self.mine.add((name, namespace))

    @rule(name=people)
    def revoke_a_key_myself(self, name: str) -> None:
        self.trust.revoke(compute_named_key_id(name))
        self.gone.add(name)

    @rule()
    def start_anew(self) -> None:
        self.trust = TrustStore(self.trust.path)
        self.store = IndexStore(self.store.folder)

    def refused(self, place: Place, document: IndexDocument, *, signer: str | None = None) -> None:
        before = self.trust.read()
        try:
            self.say(place, document, signer=signer)
        except TrustError:
            assert self.trust.read() == before
        else:
            raise AssertionError("a hostile move was believed")

    @invariant()
    def the_client_believes_what_the_model_does(self) -> None:
        record = self.trust.read()
        for (host, namespace), model in self.model.items():
            mine = self.trusted_by_me(namespace)
            for name in NAMES:
                one = make_release("1.0.0", name)
                problem = find_signer_problem(
                    one.forms[0], one, package=PackageName(namespace, "sql"), host=host,
                    record=record,
                )  # fmt: skip
                expected = model.counts(name, mine) and name not in self.gone
                assert (problem is None) == expected, (host, namespace, name, problem)
                if name in self.gone | model.revoked:
                    assert isinstance(problem, RevokedError)

    @invariant()
    def floors_are_where_they_were(self) -> None:
        for (host, namespace), model in self.model.items():
            package = PackageName(namespace, "sql")
            found = self.store.load(self.registry(host), package)
            assert (found.document.revision if found else 0) == model.revision
        self.trust.check_integrity()


def _without_keys(document: IndexDocument) -> IndexDocument:
    return IndexDocument(
        document.package,
        document.revision,
        document.updated,
        document.description,
        document.releases,
        (),
        document.revoked,
    )


RegistriesAndAClient.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestRegistriesAndAClient = RegistriesAndAClient.TestCase
