"""Publishing: what is there afterwards, what is refused, and that nothing is there in between."""

from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.registry import Registry
from tests.registry_server.publishing.parcels import Template, pulled, push, read


def test_a_published_package_is_in_the_index_and_can_be_pulled(
    registry: Registry, owner: Identity, template: Template, alice: PrivateKey
) -> None:
    parcel = template.parcel(key=alice)
    published = push(registry, owner, parcel)
    assert published.created
    [release] = read(registry, owner).releases
    assert str(release.version) == "1.0.0"
    assert [form.package_digest for form in release.forms] == [parcel.package_digest]
    contents = pulled(registry, parcel.name, parcel.package_digest)
    assert contents.content_digest == release.content_digest == parcel.content_digest
