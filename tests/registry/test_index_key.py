"""Accepting a registry: its key must be the one whose fingerprint the person was told."""

import json
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, RegistryError, TrustError, UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import open_http
from expertctl.registry.registry_trust import fetch_index_key, parse_fingerprint, plan_acceptance
from expertctl.settings import load_settings
from expertctl.trust.keys import PublicKey
from expertctl.trust.trust_record import TrustRecord
from tests.registry.hostile_registry import Serve, make_client, make_reply, serve
from tests.registry.indexes import compute_named_key_id, make_known_registry, make_named_key
from tests.registry.live_registry import run_live_registry

_ = serve  # a fixture
OTHER_HOST = "127.0.0.1:9090"


def about(**index_key: object) -> bytes:
    return make_reply(body=json.dumps({"name": "x", "index_key": index_key}).encode())


def fetched(serve: Serve, answer: bytes, fingerprint: str) -> PublicKey:
    server = serve(answer)
    with make_client(server, attempts=1) as http:
        return fetch_index_key(http, server.address, fingerprint=fingerprint)


PEM = make_named_key("index").public.pem().decode()


def test_the_key_with_the_fingerprint_is_accepted(serve: Serve) -> None:
    answer = about(key_id=compute_named_key_id("index"), public_key=PEM)
    assert fetched(serve, answer, compute_named_key_id("index")) == make_named_key("index").public


def test_a_key_with_another_fingerprint_is_refused_whatever_it_calls_itself(serve: Serve) -> None:
    answer = about(key_id=compute_named_key_id("told"), public_key=PEM)
    with pytest.raises(TrustError, match="has the index key") as refused:
        fetched(serve, answer, compute_named_key_id("told"))
    assert compute_named_key_id("index") in refused.value.message


@pytest.mark.parametrize(
    "answer",
    [
        make_reply(404),
        make_reply(body=b"{}"),
        make_reply(body=b'{"index_key": "x"}'),
        make_reply(body=b'{"index_key": {"public_key": 1}}'),
    ],
    ids=["no api", "nothing", "a text", "a number"],
)
def test_a_registry_without_an_index_key_is_told_apart(serve: Serve, answer: bytes) -> None:
    with pytest.raises(RegistryError, match="has no index key") as refused:
        fetched(serve, answer, compute_named_key_id("index"))
    assert "digest" in refused.value.hint


def test_a_key_that_is_none_is_refused(serve: Serve) -> None:
    with pytest.raises(InvalidPackageError, match="the index key of"):
        fetched(serve, about(public_key="nonsense"), compute_named_key_id("index"))


def test_a_real_registry_has_the_key_that_signs_its_index(tmp_path: Path) -> None:
    with run_live_registry(tmp_path / "data") as live, open_http(load_settings()) as http:
        wanted = live.served.registry.index_key.public
        address = RegistryAddress.parse(live.url)
        assert fetch_index_key(http, address, fingerprint=wanted.key_id) == wanted


def test_a_fingerprint_is_read_as_it_is_printed() -> None:
    assert parse_fingerprint(
        f"  {compute_named_key_id('index').upper().replace('SHA', 'sha')} "
    ) == (compute_named_key_id("index"))
    for text in (
        "",
        "abc",
        compute_named_key_id("index")[:-1],
        "md5:00",
        compute_named_key_id("index").removeprefix("sha256:"),
    ):
        with pytest.raises(UsageError, match="not a fingerprint"):
            parse_fingerprint(text)


def test_accepting_tells_what_it_changes() -> None:
    record = TrustRecord().with_registry(make_known_registry(namespaces=["acme"]))
    same = plan_acceptance(make_known_registry(), record)
    assert (same.replaced, same.moved) == (None, ())
    renewed = plan_acceptance(make_known_registry(index_key="renewed"), record)
    assert renewed.replaced == compute_named_key_id("index")
    moving = plan_acceptance(make_known_registry(OTHER_HOST, namespaces=["acme", "zoo"]), record)
    assert moving.moved == (("acme", make_known_registry().host),)
