"""The home of the soak: enough experts of all kinds, and other versions of them."""

from pathlib import Path

import pytest

from benchmarks.serving_soak import list_prompts
from benchmarks.soak.home import NAMESPACE, VERSIONS, SoakHome, make_soak_home
from expertctl.install.installer import InstallContext, install_files
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore


@pytest.fixture(scope="module")
def soak_home(tmp_path_factory: pytest.TempPathFactory) -> SoakHome:
    folder: Path = tmp_path_factory.mktemp("soak")
    (folder / "packages").mkdir()
    return make_soak_home(folder / "home", folder / "packages")


def test_there_are_experts_of_every_kind(soak_home: SoakHome) -> None:
    store = Store(soak_home.home.store)
    kinds = {store.read_manifest(expert).kind for expert in store.list_experts()}
    assert kinds == {"lora", "dora", "ia3", "soft_prompt"}
    assert len(soak_home.expert_names) >= 12
    assert set(soak_home.packages) <= set(soak_home.expert_names)


def test_the_other_version_of_each_can_be_installed(soak_home: SoakHome) -> None:
    store, bases = Store(soak_home.home.store), BaseStore(soak_home.home.bases)
    others = [versions[VERSIONS[1]] for versions in soak_home.packages.values()]
    home = soak_home.home
    install_files(others, InstallContext(store, bases, TrustStore(home.trust), home.registries))
    own = [expert for expert in store.list_experts() if expert.package.namespace == NAMESPACE]
    assert len(own) == 2 * len(soak_home.packages)
    digests = {expert.content_digest for expert in own}
    assert len(digests) == len(own), "each version is an expert of its own"


def test_there_are_prompts_that_suit_the_starter(soak_home: SoakHome) -> None:
    assert len(list_prompts(soak_home)) >= 9
