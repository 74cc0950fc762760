"""Installing from a registry over a real socket: what travels, what is checked, what is refused."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from expertctl.errors import (
    ChangedVersionError,
    ConflictError,
    ExpertError,
    MissingDependencyError,
    NotFoundError,
    OfflineError,
    RegistryError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.install.candidate import ReleaseAge
from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.grants import KnownRegistry
from tests.install.fixtures import InstallClient, PublishingRegistry, run_publishing_registry
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    sign_with_other_key,
    upload_and_publish,
)
from tests.store.fixtures import HomeFixture, PackageFactory, make_key


def refuses(buyer: InstallClient, error: type[ExpertError], match: str, *refs: str) -> str:
    """Demand a refusal that leaves no trace in the store; return its hint."""
    before = buyer.user_home.read_files()
    with pytest.raises(error, match=match) as raised:
        buyer.install(*refs)
    assert buyer.user_home.read_files() == before
    return raised.value.hint


def test_an_expert_is_installed_from_the_default_registry(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    parcel = publisher.publish("acme/sql@1.0.0")
    (done,) = buyer.install("acme/sql").installed
    assert (done.outcome, done.expert.ref) == ("installed", "acme/sql@1.0.0")
    assert done.expert.registry == publisher.host
    assert done.expert.package_digest == parcel.package_digest
    buyer.user_home.check_integrity()
    assert not list((buyer.user_home.home.registries / "arrived").iterdir())


def test_what_an_expert_requires_comes_along_first(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/low@1.0.0")
    publisher.publish("acme/low@2.0.0")
    publisher.publish("acme/top@1.0.0", requires=["acme/low@^1"])
    done = buyer.install("acme/top").installed
    assert [item.expert.ref for item in done] == ["acme/low@1.0.0", "acme/top@1.0.0"]


def test_what_disagrees_is_refused_before_a_byte_of_it_travels(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/low@1.0.0")
    publisher.publish("acme/low@2.0.0")
    publisher.publish("acme/top@1.0.0", requires=["acme/low@^2"])
    match = r"you ask acme/low@\^1, but acme/top@1\.0\.0 requires acme/low@\^2; there are 1\.0\.0"
    refuses(buyer, ConflictError, match, "acme/top", "acme/low@^1")


def test_an_exact_version_that_is_here_needs_no_network(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    (done,) = buyer.offline().install("acme/sql@1.0.0").installed
    assert done.outcome == "already installed"


def test_offline_the_index_of_last_time_counts(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    publisher.publish("acme/sql@1.1.0")
    buyer.install("acme/sql@1.0.0")
    refuses(buyer.offline(), OfflineError, r"acme/sql@1\.1\.0 must be fetched", "acme/sql")
    refuses(buyer.offline(), NotFoundError, "was never asked about acme/other", "acme/other")


def test_damage_in_the_store_is_made_good_from_the_registry(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    (done,) = buyer.install("acme/sql").installed
    blob = buyer.store.paths.blob(done.expert.layers[0].digest)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes() + b"\0")
    buyer.install("acme/sql")
    buyer.store.check_integrity()


def test_a_new_signature_replaces_the_old_one(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    parcel = publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    new = make_key("new")
    by = make_key("acme")
    statement = sign_key_statement(namespace="acme", new=new.public, by=by)
    publisher.accept_key("acme", new, statement=statement)
    upload_and_publish(
        publisher.live.served.registry, publisher.identity, sign_with_other_key(parcel, new)
    )
    (done,) = buyer.install("acme/sql").installed
    assert (done.outcome, done.expert.signer) == ("re-signed", new.public.key_id)
    buyer.user_home.check_integrity()


def test_a_key_that_nobody_vouches_for_is_refused(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    thief = make_key("thief")
    publisher.accept_key("acme", thief)
    publisher.publish("acme/sql@1.1.0", key=thief)
    hint = refuses(buyer, TrustError, "for which no key that is trusted", "acme/sql")
    assert "trust add" in hint


def test_a_version_whose_key_was_revoked_is_passed_over_and_refused_by_name(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    new = make_key("new")
    statement = sign_key_statement(namespace="acme", new=new.public, by=make_key("acme"))
    publisher.accept_key("acme", new, statement=statement)
    publisher.publish("acme/sql@1.0.0")
    publisher.publish("acme/sql@1.1.0", key=new)
    publisher.revoke("acme", new)
    assert [i.expert.ref for i in buyer.install("acme/sql").installed] == ["acme/sql@1.0.0"]
    refuses(buyer, RevokedError, "revoked", "acme/sql@1.1.0")


def test_an_expert_whose_key_was_revoked_since_is_not_taken_for_installed(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.revoke("acme", make_key("acme"))
    refuses(buyer, RevokedError, "revoked", "acme/sql")
    refuses(buyer, RevokedError, r"the key of 1\.0\.0 was revoked", "acme/sql")
    refuses(buyer, RevokedError, "revoked", "acme/sql@1.0.0")


def test_a_yanked_version_comes_only_by_its_exact_name_with_a_warning(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    publisher.publish("acme/sql@1.1.0")
    publisher.yank("acme/sql@1.1.0", "learnt a password")
    assert [i.expert.ref for i in buyer.install("acme/sql").installed] == ["acme/sql@1.0.0"]
    refuses(buyer, NotFoundError, r"1\.1\.0 was yanked: learnt a password", "acme/sql@^1.1")
    (done,) = buyer.install("acme/sql@1.1.0").installed
    assert any("was yanked: learnt a password" in warning for warning in done.warnings)
    (again,) = buyer.offline().install("acme/sql@1.1.0").installed
    assert any("was yanked" in warning for warning in again.warnings)


def test_a_young_version_waits_and_that_is_said(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    soon = ReleaseAge(timedelta(days=3), (), datetime.now(UTC) + timedelta(days=4))
    buyer.install("acme/sql", age=soon)
    publisher.publish("acme/sql@1.1.0")
    now = ReleaseAge.from_now(timedelta(days=3), ())
    with pytest.raises(NotFoundError, match=r"1\.1\.0 waits until 20"):
        buyer.install("acme/sql@1.1.0", age=now)
    age = ReleaseAge.from_now(timedelta(days=3), ("acme",))
    assert buyer.install("acme/sql", age=age).chosen[0].candidate.ref == "acme/sql@1.1.0"


def test_files_and_references_count_together(
    buyer: InstallClient, publisher: PublishingRegistry, package_factory: PackageFactory
) -> None:
    publisher.publish("acme/low@1.0.0")
    publisher.publish("acme/other@1.0.0")
    buyer.user_home.trust_keys("acme")
    file = package_factory.package("acme/file", composition={"requires": ["acme/low@^1"]})
    done = buyer.install("acme/other", files=[file]).installed
    assert sorted(i.expert.ref for i in done) == [
        "acme/file@1.0.0", "acme/low@1.0.0", "acme/other@1.0.0",
    ]  # fmt: skip
    registries = {i.expert.ref: i.expert.registry for i in done}
    assert registries["acme/file@1.0.0"] == "local"
    buyer.user_home.check_integrity()


def test_a_file_that_requires_what_nobody_has_installs_nothing(
    buyer: InstallClient, package_factory: PackageFactory
) -> None:
    buyer.user_home.trust_keys("acme")
    file = package_factory.package("acme/file", composition={"requires": ["acme/absent@^1"]})
    with pytest.raises(MissingDependencyError, match=r"acme/file@1\.0\.0 requires acme/absent"):
        buyer.install(files=[file])
    assert buyer.refs() == []


def test_nothing_to_install_is_a_usage_error(buyer: InstallClient) -> None:
    with pytest.raises(UsageError, match="nothing to install"):
        buyer.install()


def test_other_content_of_an_installed_version_is_refused(
    buyer: InstallClient, publisher: PublishingRegistry, package_factory: PackageFactory
) -> None:
    buyer.user_home.trust_keys("acme").install(package_factory.package("acme/sql"))
    publisher.publish("acme/sql@1.0.0")
    match = r"what is installed has sha256:\w+ \(signed by .*\), but .* has sha256:\w+ \(signed"
    refuses(buyer, ChangedVersionError, match, f"{publisher.host}/acme/sql@1.0.0")


def test_a_registry_that_nobody_accepted_is_believed_in_nothing(
    home: Path, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    stranger = InstallClient.create(home)
    hint = refuses(
        stranger, TrustError, "index key of .* is not known", f"{publisher.host}/acme/sql"
    )
    assert "trust registry add" in hint
    refuses(stranger, NotFoundError, "no registry is set", "acme/sql")


def test_a_registry_with_another_index_key_is_refused(
    home: Path, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    fooled = InstallClient.create(home, publisher)
    known = KnownRegistry(publisher.host, publisher.live.url, make_key("other").public)
    fooled.user_home.trust.path.unlink()
    fooled.user_home.trust.add_registry(known)
    refuses(fooled, TrustError, "is signed by", "acme/sql")


def test_a_name_is_never_taken_from_a_second_registry_by_itself(
    buyer: InstallClient, publisher: PublishingRegistry, template: PackageTemplate, tmp_path: Path
) -> None:
    """Dependency confusion: the other registry, now the default, has a higher version."""
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("acme").publish("acme/sql@9.0.0")
        confused = InstallClient.create(buyer.user_home.root, other)
        assert confused.install("acme/sql").chosen[0].candidate.ref == "acme/sql@1.0.0"
        (done,) = confused.install(f"{other.host}/acme/sql").installed
        assert (done.expert.ref, done.expert.registry) == ("acme/sql@9.0.0", other.host)


def test_a_package_cannot_send_for_its_requirement_to_a_registry_that_is_not_known(
    buyer: InstallClient, publisher: PublishingRegistry, template: PackageTemplate, tmp_path: Path
) -> None:
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("evil").publish("evil/low@1.0.0")
        publisher.publish("acme/top@1.0.0", requires=[f"{other.host}/evil/low"])
        refuses(buyer, TrustError, "index key of .* is not known", "acme/top")


def test_a_package_cannot_say_where_a_new_namespace_belongs(
    buyer: InstallClient, publisher: PublishingRegistry, template: PackageTemplate, tmp_path: Path
) -> None:
    """Else all of corp/* would come from there: a name that the usual registry may have, too."""
    with run_publishing_registry(tmp_path / "second", template) as other:
        other.create_namespace("corp").publish("corp/low@1.0.0")
        other.create_namespace("zoo").publish("zoo/top@1.0.0", requires=[f"{other.host}/corp/low"])
        buyer.user_home.trust.add_registry(other.known)
        top, low = f"{other.host}/zoo/top", f"{other.host}/corp/low"
        match = rf"zoo/top@1.0.0 requires {low}, but here corp/\* comes from"
        hint = refuses(buyer, TrustError, match, top)
        assert hint == f"if that is right: `expertctl install {low}` first"
        assert buyer.user_home.trust.read().list_registries_for("corp") == ()
        buyer.install(low)
        assert buyer.install(top).installed[0].expert.ref == "zoo/top@1.0.0"
        assert buyer.user_home.trust.read().list_registries_for("corp") == (other.host,)


def test_a_name_that_is_not_there_is_told(
    buyer: InstallClient, publisher: PublishingRegistry
) -> None:
    refuses(buyer, NotFoundError, "acme/absent is not there: .* has no package", "acme/absent")


def test_a_registry_that_does_not_answer_is_a_network_error(
    buyer: InstallClient, home: Path
) -> None:
    user_home = HomeFixture(home)
    known = KnownRegistry("127.0.0.1:9", "http://127.0.0.1:9", make_key("acme").public)
    user_home.trust.add_registry(known)
    refuses(buyer, RegistryError, "127.0.0.1:9", "127.0.0.1:9/acme/sql")
