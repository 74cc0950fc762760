"""A file of the store that cannot be used is named by the expert that it is of."""

import pytest

from expertctl.errors import DigestError, ExpertError, StoreError
from tests.store.fixtures import HomeFixture, PackageFactory
from tests.store.test_store import put


@pytest.mark.parametrize("damage", ["changed", "missing", "unreadable"])
def test_a_damaged_file_is_told_by_what_it_is_of_and_not_by_where_it_lies(
    damage: str, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    """A server hands these words on to callers, who need not know the folders of its machine."""
    (expert,) = put(user_home, package_factory.package())
    path = user_home.store.blob_path(expert.find_file("expert.json").digest)
    path.unlink()
    if damage == "changed":
        path.write_bytes(b"{}")
    elif damage == "unreadable":
        path.mkdir()
    with pytest.raises(ExpertError) as error:
        user_home.store.read_manifest(expert)
    facts = {
        "changed": "expert.json was changed in the store",
        "missing": "expert.json is missing from the store",
        "unreadable": "expert.json cannot be read in the store: Is a directory",
    }
    assert error.value.message == f"{expert.ref}: {facts[damage]}"
    assert isinstance(error.value, DigestError if damage == "changed" else StoreError)
    assert "expertctl" in error.value.hint
    assert str(user_home.home.root) not in error.value.hint
