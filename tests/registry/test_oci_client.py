"""Manifests, tags and blobs of a registry that lies: attack 94, and names that are no names."""

from io import BytesIO

import pytest

from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    DigestError,
    NotFoundError,
    RegistryError,
    UnauthenticatedError,
)
from expertctl.package.layout import MANIFEST_TYPE
from expertctl.registry.client import OciClient
from expertctl.registry.http import RegistryHttp
from tests.registry.hostile_registry import (
    HostileServer,
    ReceivedRequest,
    Reply,
    Serve,
    make_client,
    make_reply,
    serve,
)

__all__ = ["serve"]

DATA = b'{"schemaVersion": 2}'
DIGEST = Digest.compute(DATA)
OTHER = Digest.compute(b"other")


def oci(http: RegistryHttp, server: HostileServer) -> OciClient:
    return OciClient(http, server.address)


def test_a_manifest_by_digest_has_that_digest(serve: Serve) -> None:
    server = serve(make_reply(200, DATA, Content_Type=MANIFEST_TYPE))
    with make_client(server) as http:
        found = oci(http, server).fetch_manifest("acme/sql", DIGEST)
    assert (found.digest, found.data, found.media_type) == (DIGEST, DATA, MANIFEST_TYPE)
    [request] = server.requests
    assert request.target == f"/v2/acme/sql/manifests/{DIGEST}"
    assert MANIFEST_TYPE in request.headers["accept"]


def test_another_manifest_than_the_digest_is_refused(serve: Serve) -> None:
    server = serve(make_reply(200, DATA, Docker_Content_Digest=str(OTHER)))
    with make_client(server) as http, pytest.raises(DigestError, match=f"is not {OTHER}"):
        oci(http, server).fetch_manifest("acme/sql", OTHER)


def test_another_manifest_than_the_registry_says_is_refused(serve: Serve) -> None:
    server = serve(make_reply(200, DATA, Docker_Content_Digest=str(OTHER)))
    with make_client(server) as http, pytest.raises(DigestError, match=f"is not {OTHER}"):
        oci(http, server).fetch_manifest("acme/sql", "1.0.0")


@pytest.mark.parametrize("named", [str(DIGEST), None])
def test_a_manifest_by_tag_is_that_which_the_registry_names(
    serve: Serve, named: str | None
) -> None:
    headers = {"Docker_Content_Digest": named} if named else {}
    server = serve(make_reply(200, DATA, **headers))
    with make_client(server) as http:
        assert oci(http, server).fetch_manifest("acme/sql", "1.0.0").digest == DIGEST


def test_a_tag_that_moves_between_two_questions_is_seen(serve: Serve) -> None:
    answers = iter([b"", DATA, b'{"moved": 1}'])

    def script(request: ReceivedRequest) -> Reply:
        if request.method == "HEAD":
            return make_reply(200, length=len(DATA), Docker_Content_Digest=str(DIGEST))
        return make_reply(200, next(answers))

    server = serve(script)
    next(answers)
    with make_client(server) as http:
        here = oci(http, server)
        resolved = here.fetch_manifest_digest("acme/sql", "1.0.0")
        assert resolved == DIGEST
        assert here.fetch_manifest("acme/sql", resolved).data == DATA
        with pytest.raises(DigestError):
            here.fetch_manifest("acme/sql", resolved)


@pytest.mark.parametrize("named", ["sha256:../../x", "sha512:" + "0" * 128, "", "\x1b[31m"])
def test_a_registry_that_names_no_sane_digest_is_an_error(serve: Serve, named: str) -> None:
    server = serve(make_reply(200, Docker_Content_Digest=named))
    with make_client(server) as http, pytest.raises(RegistryError, match="digest") as caught:
        oci(http, server).fetch_manifest_digest("acme/sql", "1.0.0")
    assert caught.value.message.isprintable()


def test_what_is_not_there_is_none_or_false(serve: Serve) -> None:
    server = serve(make_reply(404))
    with make_client(server) as http:
        here = oci(http, server)
        assert here.fetch_manifest_digest("acme/sql", "1.0.0") is None
        assert here.has_blob("acme/sql", DIGEST) is False
        with pytest.raises(NotFoundError):
            here.fetch_manifest("acme/sql", "1.0.0")
        with pytest.raises(NotFoundError), here.open_blob("acme/sql", DIGEST):
            pass


def test_a_manifest_beyond_its_bound_is_refused(serve: Serve) -> None:
    server = serve(make_reply(200, b" " * 70_000))
    with make_client(server) as http:
        with pytest.raises(RegistryError, match="more than 65536 bytes"):
            oci(http, server).fetch_manifest("acme/sql", "1.0.0")
        larger = oci(http, server).fetch_manifest("acme/sql", "1.0.0", max_bytes=1 << 20)
        assert len(larger.data) == 70_000


@pytest.mark.parametrize(
    "name", ["", "/", "../x", "a/../b", "A/b", "a//b", "a/b/", "a b", "a/b?x", "a" * 300, "a%2fb"]
)
def test_a_name_that_is_none_is_not_asked_for(serve: Serve, name: str) -> None:
    server = serve(make_reply(200, DATA))
    with make_client(server) as http, pytest.raises(NotFoundError, match="cannot be the name"):
        oci(http, server).fetch_manifest(name, "1.0.0")
    assert server.requests == []


@pytest.mark.parametrize("tag", ["", "a/b", "../x", "-x", "1.0.0+build", "x" * 200, "a?b"])
def test_a_tag_that_is_none_is_not_asked_for(serve: Serve, tag: str) -> None:
    server = serve(make_reply(200, DATA))
    with make_client(server) as http, pytest.raises(NotFoundError, match="cannot be a tag"):
        oci(http, server).fetch_manifest("acme/sql", tag)
    assert server.requests == []


def test_a_manifest_is_put_under_its_tag(serve: Serve) -> None:
    server = serve(make_reply(201))
    with make_client(server) as http:
        assert oci(http, server).put_manifest("acme/sql", "1.0.0", DATA) == DIGEST
    [request] = server.requests
    assert (request.method, request.target) == ("PUT", "/v2/acme/sql/manifests/1.0.0")
    assert (request.headers["content-type"], request.body) == (MANIFEST_TYPE, DATA)


def test_a_tag_that_is_taken_is_a_conflict(serve: Serve) -> None:
    server = serve(make_reply(409, b'{"errors": [{"code": "DENIED", "message": "other content"}]}'))
    with make_client(server) as http, pytest.raises(ConflictError, match="other content"):
        oci(http, server).put_manifest("acme/sql", "1.0.0", DATA)


def test_a_blob_that_is_there_does_not_travel(serve: Serve) -> None:
    server, counts = serve(make_reply(200)), []
    with make_client(server) as http:
        travelled = oci(http, server).upload_blob(
            "acme/sql", DIGEST, len(DATA), lambda: BytesIO(DATA), progress=counts.append
        )
    assert (travelled, counts) == (False, [len(DATA)])
    assert [request.method for request in server.requests] == ["HEAD"]


def test_a_login_is_checked(serve: Serve) -> None:
    server = serve(
        lambda r: make_reply(200 if r.login else 401, WWW_Authenticate='Basic realm="x"')
    )
    with make_client(server) as http:
        oci(http, server).ping()
    with make_client() as http, pytest.raises(UnauthenticatedError):
        oci(http, server).ping()
