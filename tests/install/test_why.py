"""Why an expert is here, as its requirers, its key and its base tell."""

from pathlib import Path

import pytest

from expertctl.install.installed_experts import InstallReason, RequirementLink, explain_install
from expertctl.install.publication import expand_requirements, find_dependants
from expertctl.reference import Reference
from expertctl.trust.grants import Grant
from tests.factories import write_base
from tests.store.fixtures import BASE_NAME, HomeFixture, PackageFactory, make_key


def asked(user_home: HomeFixture, ref: str) -> InstallReason:
    return explain_install(
        user_home.store.find(Reference.parse(ref)),
        installed=user_home.store.list_experts(),
        bases=user_home.bases.list_bases(),
        trust=user_home.trust.read(),
    )


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    """``top`` requires ``middle``, which requires any ``low`` of 1.x."""
    user_home.install(
        package_factory.package("acme/low", seed=1),
        package_factory.package("acme/middle", composition={"requires": ["acme/low@^1"]}, seed=2),
        package_factory.package("acme/top", composition={"requires": ["acme/middle"]}, seed=3),
    )
    return user_home


def test_requirers_are_told_by_the_chain_that_leads_down(user_home: HomeFixture) -> None:
    found = asked(user_home, "acme/low")
    assert [(r.ref, r.chain) for r in found.required_by] == [
        ("acme/middle@1.0.0", (RequirementLink("acme/middle@1.0.0", "acme/low@^1"),)),
        (
            "acme/top@1.0.0",
            (
                RequirementLink("acme/top@1.0.0", "acme/middle"),
                RequirementLink("acme/middle@1.0.0", "acme/low@^1"),
            ),
        ),
    ]
    assert asked(user_home, "acme/top").required_by == ()


def test_what_would_break_is_what_finds_nothing_else(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    assert asked(user_home, "acme/low").breaks == ("acme/middle@1.0.0", "acme/top@1.0.0")
    assert asked(user_home, "acme/middle").breaks == ("acme/top@1.0.0",)
    assert asked(user_home, "acme/top").breaks == ()
    user_home.install(package_factory.package("acme/low", "1.5.0", seed=4))
    for version in ("1.0.0", "1.5.0"):
        found = asked(user_home, f"acme/low@{version}")
        assert found.breaks == ()
        assert len(found.required_by) == 2
    user_home.install(package_factory.package("acme/low", "2.0.0", seed=5))
    assert asked(user_home, "acme/low@2.0.0").required_by == ()


def test_what_is_broken_already_is_not_said_to_break(user_home: HomeFixture) -> None:
    low = user_home.store.find(Reference.parse("acme/low"))
    user_home.store.remove(low)
    assert asked(user_home, "acme/middle").breaks == ()


def test_what_breaks_at_once_is_what_remove_names(user_home: HomeFixture) -> None:
    low = user_home.store.find(Reference.parse("acme/low"))
    direct = find_dependants(low, user_home.store.list_experts())
    assert set(direct) <= set(asked(user_home, "acme/low").breaks)


def test_experts_that_require_each_other_are_each_met_once(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(
        package_factory.package("acme/egg", composition={"requires": ["acme/hen"]}, seed=5),
        package_factory.package("acme/hen", composition={"requires": ["acme/egg"]}, seed=6),
    )
    found = asked(user_home, "acme/egg")
    assert [r.ref for r in found.required_by] == ["acme/hen@1.0.0"]
    assert found.breaks == ("acme/hen@1.0.0",)
    egg = user_home.store.find(Reference.parse("acme/egg"))
    both = expand_requirements([egg], user_home.store.list_experts())
    assert [expert.ref for expert in both] == ["acme/egg@1.0.0", "acme/hen@1.0.0"]


def test_the_key_is_named_with_what_it_is_trusted_for(user_home: HomeFixture) -> None:
    vouching = asked(user_home, "acme/low").vouching
    assert vouching is not None
    assert (vouching.key_id, vouching.name) == (make_key("acme").public.key_id, "acme")
    assert (vouching.grant, vouching.revoked) == (Grant("acme"), None)


def test_trust_that_is_gone_is_told(user_home: HomeFixture) -> None:
    key = make_key("acme").public
    user_home.trust.remove(key.key_id)
    vouching = asked(user_home, "acme/low").vouching
    assert vouching is not None
    assert (vouching.key_id, vouching.name, vouching.grant) == (key.key_id, None, None)
    user_home.trust.revoke(key.key_id, "lost")
    vouching = asked(user_home, "acme/low").vouching
    assert vouching is not None
    assert vouching.revoked == "lost"


def test_a_key_for_listed_contents_counts_for_those_alone(user_home: HomeFixture) -> None:
    key = make_key("acme").public
    low = asked(user_home, "acme/low").expert
    user_home.trust.remove(key.key_id)
    user_home.trust.add(
        key, name="pinned", namespaces=["acme"], content_digests=[str(low.content_digest)]
    )
    vouching = asked(user_home, "acme/low").vouching
    assert vouching is not None
    assert vouching.grant == Grant("acme", (str(low.content_digest),))
    other = asked(user_home, "acme/top").vouching
    assert other is not None
    assert other.grant is None


def test_nobody_vouches_for_what_is_not_signed(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package("acme/unsigned", key=None), allow_unsigned=True)
    assert asked(user_home, "acme/unsigned").vouching is None


def test_the_base_is_here_when_its_digests_are(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=9)
    user_home.bases.add(other, name=BASE_NAME)
    found = asked(user_home, "acme/low")
    assert (found.expert.base.name, found.bases) == (BASE_NAME, ())
    user_home.bases.add(package_factory.base_dir, name="the-same-elsewhere")
    assert asked(user_home, "acme/low").bases == ("the-same-elsewhere",)
