"""When the publisher keys of a namespace are pinned at first, and what is said of it."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import StoreError
from expertctl.install import install as install_module
from tests.cli.commands import Commands, expertctl
from tests.install.liar import TIME, Liar, lying
from tests.registry.hostile import reply
from tests.registry_server.publishing.parcels import Parcel, Template, make_template
from tests.store.shop import House, a_key

__all__ = ["expertctl"]

KEY_ID = a_key("acme").public.key_id
TRUST, CONFLICT, FAILURE = 5, 4, 1


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def liar(
    home: Path, template: Template, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Liar]:
    with lying(template.parcel("zoo/ants", key=a_key("acme"))) as running:
        House(home).trust.add_registry(running.known)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("EXPERT_REGISTRY", running.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        yield running


def parcel(liar: Liar) -> Parcel:
    [found] = liar.parcels.values()
    return found


def is_pinned(home: Path, liar: Liar) -> bool:
    return House(home).trust.read().is_pinned(liar.host, "zoo")


def fails_unpinned(home: Path, liar: Liar, expertctl: Commands, code: int) -> None:
    before = House(home).home.trust.read_bytes()
    said = expertctl("install", "zoo/ants", code=code)
    assert "pinned for" not in said.err
    assert House(home).home.trust.read_bytes() == before
    assert House(home).refs() == []


def test_an_install_whose_signature_is_another_keys_pins_nothing(
    home: Path, liar: Liar, template: Template, expertctl: Commands
) -> None:
    """The index names acme's key as the signer; the package was signed by another."""
    liar.publish(template.parcel("zoo/ants", key=a_key("mallory")))
    fails_unpinned(home, liar, expertctl, TRUST)


def test_an_install_whose_signature_was_made_for_another_package_pins_nothing(
    home: Path, liar: Liar, template: Template, expertctl: Commands
) -> None:
    """Attack 38: the files are right, and the statement that was signed names another package."""
    from expertctl.package.spool import signed_layout
    from expertctl.trust.bundle import sign_files

    files = parcel(liar).layout.files
    for name in ("zoo/bees@1.0.0", "zoo/ants@2.0.0"):
        signature = sign_files(files, name=name, key=a_key("acme"))
        layout = signed_layout(files, signature)
        blobs = {**parcel(liar).blobs, Digest.of(signature): signature}
        liar.publish(Parcel(parcel(liar).name, "1.0.0", layout, blobs))
        said = expertctl("install", "zoo/ants", code=TRUST)
        assert f"model.sig was made for {name}, and this is zoo/ants@1.0.0" in said.err
        assert not is_pinned(home, liar)


def test_an_install_whose_download_fails_pins_nothing(
    home: Path, liar: Liar, expertctl: Commands
) -> None:
    file = max(parcel(liar).layout.layers, key=lambda layer: layer.size)
    liar.answers[f"/v2/zoo/ants/blobs/{file.digest}"] = lambda _: reply(404)
    fails_unpinned(home, liar, expertctl, 3)


def test_an_install_of_other_bytes_pins_nothing(
    home: Path, liar: Liar, expertctl: Commands
) -> None:
    file = max(parcel(liar).layout.layers, key=lambda layer: layer.size)
    wrong = bytes(file.size)
    liar.answers[f"/v2/zoo/ants/blobs/{file.digest}"] = lambda _: reply(body=wrong)
    fails_unpinned(home, liar, expertctl, TRUST)


def test_keys_are_told_when_the_install_fails_after_its_signature_was_checked(
    home: Path, liar: Liar, template: Template, expertctl: Commands
) -> None:
    expertctl("install", "zoo/ants")
    House(home).trust.remove_registry(liar.host)
    House(home).trust.add_registry(liar.known)
    assert not is_pinned(home, liar)
    hater = template.parcel("zoo/bees", key=a_key("acme"), composition={"conflicts": ["zoo/ants"]})
    liar.publish(hater)
    said = expertctl("install", "zoo/bees", "--json", code=CONFLICT)
    assert f"pinned for zoo/* of {liar.host}: key {KEY_ID} (first install" in said.err
    assert json.loads(said.out)["error"]["code"] == "conflict"
    assert is_pinned(home, liar)
    assert House(home).refs() == ["zoo/ants@1.0.0"]


def test_an_install_that_ends_between_pinning_and_publishing_can_be_repeated(
    home: Path, liar: Liar, expertctl: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise StoreError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(install_module, "_installed", killed)
        said = expertctl("install", "zoo/ants", code=FAILURE)
    assert "pinned for zoo/*" in said.err
    assert is_pinned(home, liar)
    assert House(home).refs() == []
    House(home).trust.check_integrity()
    again = expertctl("install", "zoo/ants")
    assert "pinned for" not in again.err
    assert House(home).refs() == ["zoo/ants@1.0.0"]


def test_an_index_that_is_older_than_its_registry_says_it_may_be_is_warned_of(
    liar: Liar, expertctl: Commands
) -> None:
    """Attack 24: a mirror goes on showing what was true once."""
    liar.interval_days = 7
    before = (datetime.now(UTC) - datetime.fromisoformat(TIME)).days
    said = expertctl("install", "zoo/ants", "--json")
    after = (datetime.now(UTC) - datetime.fromisoformat(TIME)).days
    warning = f"warning: what {liar.host} says of zoo/ants is "
    assert said.err.count(warning) == 1
    [told] = [note for note in said.document["notes"] if note.startswith(warning)]
    age, _, rest = told.removeprefix(warning).partition(" ")
    assert before <= int(age) <= after  # midnight may pass meanwhile
    assert rest.startswith("days old, and it says something new every 7 days: ")
