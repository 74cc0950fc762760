import base64
from collections.abc import Callable
from dataclasses import replace

import pytest

from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import TokenScope
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import JsonApiClient, Publish, RegistryHarness, open_harness

Clients = Callable[[str | None], JsonApiClient]
NEW = {
    "name": "acme",
    "kind": "expert",
    "read": "token",
    "quota": 50_000_000_000,
    "used": 0,
    "owners": ["boss"],
    "publishers": [],
    "keys": [],
}


def pem(key: PrivateKey) -> str:
    return key.public.pem().decode()


def test_an_admin_makes_a_namespace_and_owns_it(boss: JsonApiClient) -> None:
    assert boss("POST", "namespaces", {"name": "acme"}) == (201, NEW)
    assert boss("GET", "namespaces/acme") == (200, NEW)
    assert boss("GET", "namespaces") == (200, {"namespaces": [NEW], "next": None})


def test_a_namespace_is_made_as_was_wished(boss: JsonApiClient, olga: JsonApiClient) -> None:
    wish = {"name": "acme", "kind": "oci", "read": "public", "quota": 5, "owners": ["olga"]}
    status, made = boss("POST", "namespaces", wish)
    assert status == 201
    assert {**wish, "used": 0, "publishers": [], "keys": []} == made


@pytest.mark.parametrize("read", ["public", "token"])
def test_a_namespace_without_its_own_word_is_read_as_the_registry_says(
    make_registry: NewRegistry, read: str
) -> None:
    first = make_registry()
    first.registry.close()
    served = open_harness(replace(first.settings, read=read))
    boss = JsonApiClient(served.client(served.create_user("boss", admin=True)))
    assert boss("POST", "namespaces", {"name": "acme", "read": None})[1]["read"] == read
    assert boss("GET", "")[1]["read"] == read
    served.close()


def test_an_owner_who_is_nobody_leaves_no_namespace_behind(boss: JsonApiClient) -> None:
    assert boss("POST", "namespaces", {"name": "acme", "owners": ["boss", "eve"]})[0] == 404
    assert boss("GET", "namespaces/acme")[0] == 404


@pytest.mark.parametrize("name", ["acme", "acrne", "a-cme", "admin", "api"])
def test_attack_78_taken_reserved_and_confusable_names(boss: JsonApiClient, name: str) -> None:
    boss("POST", "namespaces", {"name": "acme"})
    assert boss("POST", "namespaces", {"name": name})[0] == 409


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "acme", "kind": "npm"},
        {"name": "acme", "read": "everybody"},
        {"name": "acme", "quota": -1},
        {"name": "acme", "quota": 2**53},
        {"name": "acme", "quota": 1.5},
        {"name": "acme", "owners": ["a"] * 21},
        {"name": "acme/x"},
    ],
)
def test_a_namespace_request_is_read_strictly(boss: JsonApiClient, body: object) -> None:
    assert boss("POST", "namespaces", body)[0] == 400


def test_a_whole_number_may_be_written_as_a_fraction(boss: JsonApiClient) -> None:
    assert boss("POST", "namespaces", {"name": "acme", "quota": 5.0})[1]["quota"] == 5


def test_who_may_see_which_namespaces(
    served: RegistryHarness, olga: JsonApiClient, nobody: JsonApiClient, asking: Clients
) -> None:
    for name, read in (("bb", "public"), ("aa", "token"), ("cc", "token")):
        served.create_namespace(name, read=read, owner="olga")

    def seen(who: JsonApiClient) -> list[str]:
        return [each["name"] for each in who("GET", "namespaces")[1]["namespaces"]]

    assert seen(olga) == ["aa", "bb", "cc"]
    assert seen(nobody) == ["bb"]
    assert seen(asking(served.create_token("olga", TokenScope.parse("read:aa")))) == ["aa", "bb"]
    page = olga("GET", "namespaces?limit=2")[1]
    assert page["next"] == "bb"
    assert [n["name"] for n in olga("GET", "namespaces?cursor=bb")[1]["namespaces"]] == ["cc"]


def test_attack_86_a_private_namespace_and_a_missing_one_look_the_same_to_strangers(
    served: RegistryHarness, olga: JsonApiClient, nobody: JsonApiClient, asking: Clients
) -> None:
    served.create_namespace("secret", owner="olga")
    served.create_user("eve")
    narrow = asking(served.create_token("eve", TokenScope.parse("push:elsewhere/x")))
    for who, expected in ((nobody, 401), (narrow, 403)):
        for call in (
            ("GET", "namespaces/{}", None),
            ("GET", "packages/{}/x", None),
            ("GET", "packages/{}/x/1.0.0", None),
            ("PATCH", "namespaces/{}", {"read": "public"}),
            ("PUT", "namespaces/{}/members/eve", {"role": "owner"}),
        ):
            method, path, body = call
            answers = [who(method, path.format(name), body) for name in ("secret", "absent")]
            assert answers[0][0] == expected
            assert str(answers[0]).replace("secret", "N") == str(answers[1]).replace("absent", "N")


def test_an_owner_changes_who_reads_and_an_admin_how_much_fits(
    served: RegistryHarness, boss: JsonApiClient, olga: JsonApiClient
) -> None:
    served.create_namespace("acme", owner="olga")
    assert olga("PATCH", "namespaces/acme", {"read": "public"})[1]["read"] == "public"
    assert olga("PATCH", "namespaces/acme", {"quota": 10**15})[0] == 403
    assert boss("PATCH", "namespaces/acme", {"quota": 7})[1]["quota"] == 7
    assert boss("PATCH", "namespaces/acme", {"quota": None})[1]["quota"] == 50_000_000_000
    assert boss("PATCH", "namespaces/acme", {})[1]["read"] == "public"
    assert olga("PATCH", "namespaces/acme", {"kind": "oci"})[0] == 400


def test_owners_give_and_take_roles(
    served: RegistryHarness, boss: JsonApiClient, olga: JsonApiClient
) -> None:
    served.create_namespace("acme", owner="olga")
    path = "namespaces/acme/members/boss"
    assert olga("PUT", path, {"role": "publisher"}) == (200, {"user": "boss", "role": "publisher"})
    assert olga("GET", "namespaces/acme")[1]["publishers"] == ["boss"]
    assert olga("PUT", path, {"role": "owner"})[0] == 200
    assert olga("DELETE", path) == (204, {})
    assert olga("DELETE", path)[0] == 404
    assert olga("PUT", "namespaces/acme/members/eve", {"role": "owner"})[0] == 404
    assert olga("PUT", path, {"role": "king"})[0] == 400


def test_one_owner_stays(served: RegistryHarness, boss: JsonApiClient, olga: JsonApiClient) -> None:
    served.create_namespace("acme", owner="olga")
    assert olga("DELETE", "namespaces/acme/members/olga")[0] == 409
    assert olga("PUT", "namespaces/acme/members/olga", {"role": "publisher"})[0] == 409
    assert boss("DELETE", "users/olga")[0] == 409


@pytest.mark.parametrize("scopes", [["read"], ["push:acme"], ["manage:other"]])
def test_managing_takes_the_right_and_the_scope(
    served: RegistryHarness, olga: JsonApiClient, asking: Clients, scopes: list[str]
) -> None:
    served.create_namespace("acme", owner="olga")
    eve = asking(served.create_user("eve"))
    narrow = asking(served.create_token("olga", *(TokenScope.parse(s) for s in scopes)))
    for who in (eve, narrow):
        assert who("PATCH", "namespaces/acme", {"read": "public"})[0] == 403
        assert who("PUT", "namespaces/acme/members/eve", {"role": "owner"})[0] == 403
        assert who("DELETE", "namespaces/acme/members/olga")[0] == 403


def test_keys_are_added_vouched_for_and_revoked(
    served: RegistryHarness, olga: JsonApiClient
) -> None:
    served.create_namespace("acme", kind="expert", owner="olga")
    old, new = PrivateKey.generate(), PrivateKey.generate("ed25519")
    path = "namespaces/acme/keys"
    added = {"key_id": old.public.key_id, "vouched_by": None, "warnings": []}
    assert olga("POST", path, {"public_key": pem(old)}) == (200, added)
    statement = sign_key_statement(namespace="acme", new=new.public, by=old)
    body = {"public_key": pem(new), "statement": base64.b64encode(statement).decode()}
    vouched = {"key_id": new.public.key_id, "vouched_by": old.public.key_id, "warnings": []}
    assert olga("POST", path, body) == (200, vouched)
    assert olga("DELETE", f"{path}/{old.public.key_id}", {"reason": "laptop lost"})[0] == 204
    keys = {k["key_id"]: k for k in olga("GET", "namespaces/acme")[1]["keys"]}
    assert keys[old.public.key_id] == {
        "key_id": old.public.key_id,
        "public_key": pem(old),
        "revoked": True,
        "reason": "laptop lost",
    }
    assert keys[new.public.key_id]["revoked"] is False


@pytest.mark.parametrize(
    "body",
    [
        {"public_key": "nonsense"},
        {"public_key": ""},
        {"public_key": "PEM", "statement": "!!!"},
        {"public_key": "PEM", "statement": base64.b64encode(b"{}").decode()},
    ],
)
def test_what_is_no_key_is_refused(
    served: RegistryHarness, olga: JsonApiClient, body: dict[str, str]
) -> None:
    served.create_namespace("acme", kind="expert", owner="olga")
    real = pem(PrivateKey.generate())
    wish = {name: value.replace("PEM", real) for name, value in body.items()}
    assert olga("POST", "namespaces/acme/keys", wish)[0] == 400


def test_an_unknown_key_is_not_revoked(served: RegistryHarness, olga: JsonApiClient) -> None:
    served.create_namespace("acme", kind="expert", owner="olga")
    path = f"namespaces/acme/keys/sha256:{'0' * 64}"
    assert olga("DELETE", path, {"reason": "why not"})[0] == 404
    assert olga("DELETE", path, {"reason": ""})[0] == 400
    assert olga("DELETE", path)[0] == 415


def test_used_bytes_are_those_of_what_was_published(publish: Publish, olga: JsonApiClient) -> None:
    publish("acme/sql", "1.0.0")
    first = olga("GET", "namespaces/acme")[1]["used"]
    size = olga("GET", "packages/acme/sql")[1]["versions"][0]["size"]
    assert first > size > 0
    publish("acme/sql", "1.0.1")
    second = olga("GET", "namespaces/acme")[1]["used"]
    assert 0 < second - first < first
