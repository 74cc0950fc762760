"""Accepting a registry: its key must be the one whose fingerprint the person was told."""

import json
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, RegistryError, TrustError, UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import open_http
from expertctl.registry.index_key import accept, fetch_index_key, read_fingerprint
from expertctl.settings import load_settings
from expertctl.trust.keys import PublicKey
from expertctl.trust.record import TrustRecord
from tests.registry.hostile import Serve, client, reply, serve
from tests.registry.indexes import key, key_id, known
from tests.registry.live import live_registry

_ = serve  # a fixture
OTHER_HOST = "127.0.0.1:9090"


def about(**index_key: object) -> bytes:
    return reply(body=json.dumps({"name": "x", "index_key": index_key}).encode())


def fetched(serve: Serve, answer: bytes, fingerprint: str) -> PublicKey:
    server = serve(answer)
    with client(server, attempts=1) as http:
        return fetch_index_key(http, server.address, fingerprint=fingerprint)


PEM = key("index").public.pem().decode()


def test_the_key_with_the_fingerprint_is_accepted(serve: Serve) -> None:
    answer = about(key_id=key_id("index"), public_key=PEM)
    assert fetched(serve, answer, key_id("index")) == key("index").public


def test_a_key_with_another_fingerprint_is_refused_whatever_it_calls_itself(serve: Serve) -> None:
    answer = about(key_id=key_id("told"), public_key=PEM)
    with pytest.raises(TrustError, match="has the index key") as refused:
        fetched(serve, answer, key_id("told"))
    assert key_id("index") in refused.value.message


@pytest.mark.parametrize(
    "answer",
    [
        reply(404),
        reply(body=b"{}"),
        reply(body=b'{"index_key": "x"}'),
        reply(body=b'{"index_key": {"public_key": 1}}'),
    ],
    ids=["no api", "nothing", "a text", "a number"],
)
def test_a_registry_without_an_index_key_is_told_apart(serve: Serve, answer: bytes) -> None:
    with pytest.raises(RegistryError, match="says nothing of an index key") as refused:
        fetched(serve, answer, key_id("index"))
    assert "digest" in refused.value.hint


def test_a_key_that_is_none_is_refused(serve: Serve) -> None:
    with pytest.raises(InvalidPackageError, match="the index key of"):
        fetched(serve, about(public_key="nonsense"), key_id("index"))


def test_a_real_registry_has_the_key_that_signs_its_index(tmp_path: Path) -> None:
    with live_registry(tmp_path / "data") as live, open_http(load_settings()) as http:
        wanted = live.served.registry.index_key.public
        address = RegistryAddress.parse(live.url)
        assert fetch_index_key(http, address, fingerprint=wanted.key_id) == wanted


def test_a_fingerprint_is_read_as_it_is_printed() -> None:
    assert read_fingerprint(f"  {key_id('index').upper().replace('SHA', 'sha')} ") == (
        key_id("index")
    )
    for text in (
        "",
        "abc",
        key_id("index")[:-1],
        "md5:00",
        key_id("index").removeprefix("sha256:"),
    ):
        with pytest.raises(UsageError, match="not a fingerprint"):
            read_fingerprint(text)


def test_accepting_tells_what_it_changes() -> None:
    record = TrustRecord().with_registry(known(namespaces=["acme"]))
    same = accept(known(), record)
    assert (same.replaced, same.moved) == (None, ())
    renewed = accept(known(index_key="renewed"), record)
    assert renewed.replaced == key_id("index")
    moving = accept(known(OTHER_HOST, namespaces=["acme", "zoo"]), record)
    assert moving.moved == (("acme", known().host),)
