import pytest

from registry_server.access.authentication import (
    MAX_HOPS,
    get_rate_limit_key,
    parse_networks,
    resolve_client_address,
)

PROXIES = parse_networks(["10.0.0.0/8", "::1/128", "fd00::/8"])


def address(peer: str | None, *forwarded: str) -> str:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    client = None if peer is None else (peer, 1234)
    return resolve_client_address({"type": "http", "client": client, "headers": headers}, PROXIES)


@pytest.mark.parametrize("forwarded", ["198.51.100.1", "10.0.0.9", "", "127.0.0.1"])
def test_attack_85_forwarded_headers_of_strangers_are_not_believed(forwarded: str) -> None:
    assert address("192.0.2.7", forwarded) == "192.0.2.7"


@pytest.mark.parametrize(
    ("forwarded", "expected"),
    [
        (["198.51.100.1"], "198.51.100.1"),
        (["1.1.1.1, 198.51.100.1"], "198.51.100.1"),
        (["1.1.1.1", "198.51.100.1"], "198.51.100.1"),
        (["1.1.1.1, 198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        (["2001:db8::5"], "2001:db8::5"),
        (["::ffff:198.51.100.1"], "198.51.100.1"),
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["unknown"], "10.0.0.1"),
        (["198.51.100.1, evil"], "10.0.0.1"),
        (["198.51.100.1:80"], "10.0.0.1"),
        (["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
    ],
)
def test_a_trusted_proxy_names_the_last_hop_that_is_no_proxy(
    forwarded: list[str], expected: str
) -> None:
    assert address("10.0.0.1", *forwarded) == expected


def test_a_long_list_of_hops_is_read_from_its_end() -> None:
    hops = ", ".join(["192.0.2.1"] + ["10.0.0.2"] * 1000)
    assert address("10.0.0.1", hops) == "10.0.0.2"
    assert address("10.0.0.1", ", ".join(["192.0.2.1"] + ["10.0.0.2"] * (MAX_HOPS - 1))) == (
        "192.0.2.1"
    )


@pytest.mark.parametrize("peer", [None, "", "unix:/run/registry", "testclient"])
def test_a_peer_without_an_address_is_unknown(peer: str | None) -> None:
    assert address(peer, "198.51.100.1") == "unknown"


def test_addresses_have_one_form() -> None:
    assert address("2001:DB8:0::5") == "2001:db8::5"
    assert address("fe80::1%eth0") == "fe80::1"
    assert address("::ffff:192.0.2.7") == "192.0.2.7"


def test_a_network_of_one_customer_is_limited_together() -> None:
    assert (
        get_rate_limit_key("2001:db8::5")
        == get_rate_limit_key("2001:db8::ffff:1")
        == "2001:db8::/64"
    )
    assert get_rate_limit_key("2001:db8:0:1::5") == "2001:db8:0:1::/64"
    assert get_rate_limit_key("192.0.2.7") == "192.0.2.7"
    assert get_rate_limit_key("unknown") == "unknown"
