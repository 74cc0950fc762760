"""Any order of installs, removals, collections and re-signings, held to a plain dictionary."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expertctl.errors import ChangedVersionError, NotFoundError
from expertctl.reference import Reference
from tests.store.fixtures import HomeFixture, PackageFactory

NAMES = st.sampled_from(["acme/one", "acme/two"])
VERSIONS = st.sampled_from(["1.0.0", "2.0.0"])
SEEDS = st.sampled_from([0, 1])
SIGNERS = st.sampled_from(["acme", "other", None])


class StoreMachine(RuleBasedStateMachine):
    """``model`` says which seed and signer each installed ref has."""

    package_factory: PackageFactory
    folder: Path

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(dir=self.folder))
        self.user_home = HomeFixture(self.root).trust_keys("acme", "other")
        self.model: dict[str, tuple[int, str | None]] = {}

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    @rule(name=NAMES, version=VERSIONS, seed=SEEDS, key=SIGNERS)
    def install(self, name: str, version: str, seed: int, key: str | None) -> None:
        ref, file = (
            f"{name}@{version}",
            self.package_factory.package(name, version, key=key, seed=seed),
        )
        old = self.model.get(ref)
        try:
            (done,) = self.user_home.install(file, allow_unsigned=True)
        except ChangedVersionError:
            assert old is not None
            assert old[0] != seed
            return
        assert old is None or old[0] == seed
        kept = old[1] if old and key is None else key
        assert done.outcome == outcome(old, (seed, kept))
        self.model[ref] = (seed, kept)

    @rule(name=NAMES, version=VERSIONS)
    def remove(self, name: str, version: str) -> None:
        ref = f"{name}@{version}"
        try:
            self.user_home.store.remove(self.user_home.store.find(Reference.parse(ref)))
        except NotFoundError:
            assert ref not in self.model
        else:
            del self.model[ref]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage_and_install_again(self, data: Any) -> None:
        ref = data.draw(st.sampled_from(sorted(self.model)))
        seed, key = self.model[ref]
        expert = self.user_home.store.find(Reference.parse(ref))
        file = data.draw(st.sampled_from(expert.layers))
        self.user_home.store.blob_path(file.digest).unlink()
        for other, (its_seed, its_key) in self.model.items():
            name, version = other.split("@")
            self.user_home.install(
                self.package_factory.package(name, version, key=its_key, seed=its_seed),
                allow_unsigned=True,
            )
        assert self.model[ref] == (seed, key)

    @rule()
    def collect(self) -> None:
        assert self.user_home.store.collect_garbage().blobs == ()

    @invariant()
    def the_store_is_what_the_model_says(self) -> None:
        if not hasattr(self, "user_home"):
            return
        store = self.user_home.store
        assert set(self.user_home.refs()) == set(self.model)
        for expert in store.list_experts():
            seed, key = self.model[expert.ref]
            made = self.package_factory.read_contents(
                str(expert.package), str(expert.version), key=key, seed=seed
            )
            assert expert.package_digest == made.package_digest
        store.check_integrity()
        needed = {f.digest.hex for e in store.list_experts() for f in e.layers}
        blobs = store.paths.blobs
        assert ({p.name for p in blobs.iterdir()} if blobs.exists() else set()) == needed


def outcome(old: tuple[int, str | None] | None, new: tuple[int, str | None]) -> str:
    if old is None:
        return "installed"
    return "already installed" if old == new else "re-signed"


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 12), pytest.param(100, 40, marks=pytest.mark.all)]
)
def test_the_store_agrees_with_a_dictionary(
    examples: int, steps: int, package_factory: PackageFactory, fast: Path
) -> None:
    run_state_machine_as_test(
        type("OneShop", (StoreMachine,), {"package_factory": package_factory, "folder": fast}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
