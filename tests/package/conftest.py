"""One base, one adapter and one package for the whole area; tests that change files copy them."""

import shutil
from pathlib import Path

import pytest

from expertctl.package.base_model import BaseFacts, read_base
from expertctl.trust.keys import PrivateKey
from tests.factories import make_package, write_base, write_lora


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("package")


@pytest.fixture(scope="session")
def base_dir(shared: Path) -> Path:
    return write_base(shared / "base")


@pytest.fixture(scope="session")
def facts(base_dir: Path) -> BaseFacts:
    return read_base(base_dir, name="tiny")


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture(scope="session")
def package(shared: Path, base_dir: Path, facts: BaseFacts, key: PrivateKey) -> Path:
    """A signed package; never changed."""
    return make_package(shared, base_dir=base_dir, base=facts, key=key)


@pytest.fixture(scope="session")
def unsigned(shared: Path, base_dir: Path, facts: BaseFacts) -> Path:
    """The same package without a signature; never changed."""
    return make_package(shared, base_dir=base_dir, base=facts, output=shared / "unsigned.expert")


@pytest.fixture(scope="session")
def lora_template(shared: Path, base_dir: Path) -> Path:
    return write_lora(shared / "lora", base_dir)


@pytest.fixture
def lora(tmp_path: Path, lora_template: Path) -> Path:
    """An adapter directory of the test's own."""
    return Path(shutil.copytree(lora_template, tmp_path / "my-lora"))
