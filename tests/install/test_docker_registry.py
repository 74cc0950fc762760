"""The client against a registry that is not ours: Debian's docker-registry."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from expertctl.digest import Digest
from expertctl.errors import RegistryError
from expertctl.package.layout import CONFIG
from expertctl.registry.client import OciClient
from expertctl.registry.http import RegistryHttp
from tests.install.fixtures import InstallClient
from tests.registry.docker_registry import run_docker_registry
from tests.registry_server.publishing.package_fixtures import PackageTemplate
from tests.store.fixtures import make_key

pytestmark = pytest.mark.all


def test_an_expert_travels_through_it_unchanged(
    home: Path, template: PackageTemplate, tmp_path: Path
) -> None:
    parcel = template.make_package("acme/sql", key=make_key("acme"))
    (tmp_path / "docker").mkdir()
    with run_docker_registry(tmp_path / "docker") as registry:
        with RegistryHttp() as http:
            client = OciClient(http, registry.address)
            for digest, data in parcel.blobs.items():

                @contextmanager
                def opened(data: bytes = data) -> Iterator[BinaryIO]:
                    yield BytesIO(data)

                client.upload_blob("acme/sql", digest, len(data), opened)
            client.put_manifest("acme/sql", "1.0.0", parcel.layout.manifest)
        assert Digest.compute(CONFIG) in parcel.blobs
        buyer, host = InstallClient.create(home), registry.address.host
        with pytest.raises(RegistryError, match="has no index of experts"):
            buyer.install(f"{host}/acme/sql")
        (done,) = buyer.install(f"{host}/acme/sql@{parcel.package_digest}").installed
        assert done.expert.package_digest == parcel.package_digest
        buyer.user_home.trust.add(
            make_key("acme").public, name="acme", namespaces=["acme"], registry=host
        )
        buyer.store.remove(done.expert)
        (signed,) = buyer.install(f"{host}/acme/sql@1.0.0").installed
        assert signed.expert.signer == make_key("acme").public.key_id
        buyer.user_home.check_integrity()
