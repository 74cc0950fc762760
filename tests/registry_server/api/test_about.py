from expertctl import __version__
from tests.registry_server.harness import URL, JsonApiClient, RegistryHarness


def test_anybody_is_told_what_the_registry_is(
    served: RegistryHarness, nobody: JsonApiClient
) -> None:
    key = served.registry.index_key.public
    assert nobody("GET", "") == (
        200,
        {
            "name": "expertctl registry",
            "version": __version__,
            "url": URL,
            "read": "token",
            "index_key": {"key_id": key.key_id, "public_key": key.pem().decode()},
        },
    )
