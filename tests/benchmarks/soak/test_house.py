"""The home of the soak: enough experts of all kinds, and other versions of them."""

from pathlib import Path

import pytest

from benchmarks.serving_soak import prompts_of
from benchmarks.soak.house import NAMESPACE, VERSIONS, House, furnish
from expertctl.install.install import install_files
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder: Path = tmp_path_factory.mktemp("soak")
    (folder / "packages").mkdir()
    return furnish(folder / "home", folder / "packages")


def test_there_are_experts_of_every_kind(house: House) -> None:
    store = Store(house.home.store)
    kinds = {store.manifest(expert).kind for expert in store.experts()}
    assert kinds == {"lora", "dora", "ia3", "soft_prompt"}
    assert len(house.experts) >= 12
    assert set(house.packages) <= set(house.experts)


def test_the_other_version_of_each_can_be_installed(house: House) -> None:
    store, bases = Store(house.home.store), BaseStore(house.home.bases)
    others = [versions[VERSIONS[1]] for versions in house.packages.values()]
    install_files(others, store=store, bases=bases, trust=TrustStore(house.home.trust))
    own = [expert for expert in store.experts() if expert.package.namespace == NAMESPACE]
    assert len(own) == 2 * len(house.packages)
    digests = {expert.content_digest for expert in own}
    assert len(digests) == len(own), "each version is an expert of its own"


def test_there_are_prompts_that_suit_the_starter(house: House) -> None:
    assert len(prompts_of(house)) >= 9
