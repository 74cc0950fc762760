"""``why`` as a person types it."""

import pytest

from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import (
    BASE_NAME,
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["expertctl", "fast", "package_factory", "user_home"]


@pytest.fixture(autouse=True)
def experts(user_home: HomeFixture, package_factory: PackageFactory) -> None:
    user_home.install(
        package_factory.package("acme/low", seed=1),
        package_factory.package("acme/top", composition={"requires": ["acme/low@^1"]}, seed=3),
    )


def test_all_that_is_known_is_said(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    key = make_key("acme").public.key_id
    assert expertctl("why", "acme/low").out.splitlines() == [
        "acme/low@1.0.0",
        "  required by acme/top@1.0.0 → acme/low@^1",
        "  installed from a file",
        f"  signed by acme ({key}), which is trusted for acme/*",
        f"  made for the base {BASE_NAME}, which is not registered",
        "  without it these will not run: acme/top@1.0.0",
    ]
    user_home.bases.add(package_factory.base_dir, name=BASE_NAME)
    user_home.trust.revoke(key, "lost")
    assert expertctl("why", "acme/top").out.splitlines() == [
        "acme/top@1.0.0",
        "  nothing requires it",
        "  installed from a file",
        f"  signed by acme ({key}), which was revoked: lost",
        f"  made for the base {BASE_NAME}, which is registered",
        "  nothing else needs it to run",
    ]


def test_the_document_has_the_chains(expertctl: CommandRunner, user_home: HomeFixture) -> None:
    (low, _) = user_home.store.list_experts()
    assert expertctl("why", str(low.content_digest), "--json").document == {
        "ref": "acme/low@1.0.0",
        "content_digest": str(low.content_digest),
        "package_digest": str(low.package_digest),
        "registry": "local",
        "required_by": [
            {
                "ref": "acme/top@1.0.0",
                "chain": [{"ref": "acme/top@1.0.0", "requires": "acme/low@^1"}],
            }
        ],
        "breaks": ["acme/top@1.0.0"],
        "signature": {
            "key_id": make_key("acme").public.key_id,
            "name": "acme",
            "trusted": True,
            "namespace": "acme",
            "only_listed_content": False,
            "revoked": None,
        },
        "base": {"name": BASE_NAME, "revision": None, "here": []},
        "warnings": [],
        "used": True,
        "used_instead": None,
        "others": [],
        "pinned": None,
        "yanked": None,
    }


def test_a_key_that_is_trusted_no_more_and_no_signature_at_all(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.trust.remove(make_key("acme").public.key_id)
    assert "which is no longer trusted for acme/*" in expertctl("why", "acme/low").out
    user_home.install(package_factory.package("acme/unsigned", key=None), allow_unsigned=True)
    said = expertctl("why", "acme/unsigned")
    assert "not signed: installed with --allow-unsigned" in said.out
    assert expertctl("why", "acme/unsigned", "--json").document["signature"] is None


def test_what_is_not_installed_is_not_found(
    expertctl: CommandRunner, user_home: HomeFixture
) -> None:
    assert "did you mean acme/low" in expertctl("why", "acme/lov", exit_code=3).err
    expertctl("why", "Not A Reference", exit_code=2)


def test_a_damaged_record_is_warned_of(expertctl: CommandRunner, user_home: HomeFixture) -> None:
    (top,) = (path for path in user_home.store.paths.refs.rglob("*") if "top" in path.parts[-2:-1])
    next(iter([top] if top.is_file() else top.iterdir())).write_text("{}")
    said = expertctl("why", "acme/low")
    assert "warning: the record of acme/top@1.0.0 is damaged" in said.err
    assert "nothing requires it" in said.out
