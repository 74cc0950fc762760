"""Keys that were revoked and versions that were yanked after an install, over real sockets."""

import json
import time
from pathlib import Path

import pytest
from sqlalchemy import update

from expertctl.registry.errors import RetrySchedule
from expertctl.trust.dsse import sign_key_statement
from registry_server.app import renew_index_batch
from registry_server.database.tables import PACKAGES
from registry_server.publishing.index import renew_indexes
from registry_server.settings import DAY
from tests.cli.command_runner import CommandRunner, expertctl
from tests.install.fixtures import PublishingRegistry, publisher, run_publishing_registry, template
from tests.registry.hostile_registry import (
    ReceivedRequest,
    RecordedPauses,
    Reply,
    make_reply,
    run_hostile_registry,
)
from tests.registry_server.publishing.package_fixtures import PackageTemplate
from tests.store.fixtures import HomeFixture, make_key

__all__ = ["expertctl", "publisher", "template"]

pytestmark = pytest.mark.all

OLD, NEW = make_key("acme"), make_key("new")
TRUST = 5


@pytest.fixture
def user_home(
    home: Path, publisher: PublishingRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HomeFixture:
    """A home that knows the market, and a working folder with an exact version in its project."""
    found = HomeFixture(home)
    found.trust.add_registry(publisher.known)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("EXPERT_REGISTRY", publisher.host)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    publisher.publish("acme/sql@1.0.0")
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "1.0.0"\n')
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["update"],
        ["outdated"],
        ["install"],
        ["install", "--locked"],
        ["install", "acme/sql@1.0.0"],
        ["lock"],
        ["doctor", "--online"],
    ],
    ids=" ".join,
)
def test_a_key_that_was_revoked_after_an_exact_install_is_reported(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    publisher: PublishingRegistry,
    words: list[str],
) -> None:
    """Attack 113."""
    expertctl("install")
    publisher.revoke("acme", OLD, "laptop stolen")
    before = user_home.store.list_experts()
    said = expertctl(*words, exit_code=TRUST)
    told = said.out + said.err
    assert "was revoked" in told
    assert "laptop stolen" in told
    assert OLD.public.key_id in told
    assert "current" not in said.err
    document = json.loads(expertctl(*words, "--json", exit_code=TRUST).out)
    match words[0]:
        case "outdated":
            [entry] = document["experts"]
            assert entry["revoked"]
            assert entry["notices"][0]["kind"] == "revoked"
        case "doctor":
            assert [f["subject"] for f in document["findings"] if f["untrusted"]] == [
                "acme/sql@1.0.0"
            ]
        case _:
            assert document["error"]["code"] == "revoked"
    assert user_home.store.list_experts() == before


def test_outdated_reports_a_revoked_key_of_a_package_that_its_registry_took_away(
    expertctl: CommandRunner,
    home: Path,
    template: PackageTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_hostile_registry(template.make_package("zoo/ants", key=OLD)) as hostile_registry:
        trust = HomeFixture(home).trust
        trust.add_registry(hostile_registry.known)
        monkeypatch.setenv("EXPERT_REGISTRY", hostile_registry.host)
        expertctl("install", "zoo/ants")
        trust.revoke(OLD.public.key_id, "laptop stolen")
        hostile_registry.packages.clear()
        [entry] = expertctl("outdated", "--json", exit_code=TRUST).document["experts"]
    assert (entry["current"], entry["newest"], entry["revoked"]) == ("1.0.0", "1.0.0", True)


def test_an_exact_version_of_the_users_own_list_is_asked_about_too(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    Path("experts.toml").unlink()
    expertctl("install", "acme/sql@1.0.0")
    publisher.revoke("acme", OLD)
    assert "revoked" in expertctl("update", exit_code=TRUST).err
    assert "revoked" in expertctl("outdated", exit_code=TRUST).err


def test_a_version_that_was_signed_anew_is_installed_after_the_revocation(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    expertctl("install")
    word = sign_key_statement(namespace="acme", new=NEW.public, by=OLD)
    publisher.accept_key("acme", NEW, statement=word)
    expertctl("install")  # which pins the new key with the word of the old one
    publisher.revoke("acme", OLD)
    publisher.publish("acme/sql@1.0.0", key=NEW)
    assert "signed anew" in expertctl("outdated", exit_code=TRUST).err
    assert "re-signed: acme/sql@1.0.0" in expertctl("install", "acme/sql@1.0.0").out
    expertctl("doctor", "--online")


@pytest.mark.parametrize(
    "words", [["update"], ["install"], ["install", "acme/sql@1.0.0"], ["lock"]], ids=" ".join
)
def test_a_version_that_was_yanked_after_an_exact_install_is_reported(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    publisher: PublishingRegistry,
    words: list[str],
) -> None:
    expertctl("install")
    publisher.yank("acme/sql@1.0.0", "wrong joins")
    said = expertctl(*words)
    assert said.err.count("warning: acme/sql@1.0.0 was yanked: wrong joins; ") == 1
    [notice] = expertctl(*words, "--json").document["notices"]
    assert (notice["kind"], notice["ref"]) == ("yanked", "acme/sql@1.0.0")


def test_doctor_online_notes_a_yank_and_finds_nothing_broken(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    expertctl("install")
    publisher.yank("acme/sql@1.0.0", "wrong joins")
    assert "yanked" not in expertctl("doctor").out
    assert "note: acme/sql@1.0.0: it was yanked: wrong joins" in expertctl("doctor", "--online").out


def test_doctor_does_not_say_that_all_is_well_without_asking(
    expertctl: CommandRunner, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("install")
    monkeypatch.setenv("EXPERT_OFFLINE", "1")
    said = expertctl("doctor", "--online", "--json", exit_code=6)
    assert said.document["error"]["code"] == "offline"


def test_an_older_installed_version_whose_key_was_revoked_is_warned_of(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    install_versions_of_two_keys(expertctl, publisher)
    publisher.revoke("acme", OLD)
    for words in (["update"], ["install"], ["outdated"]):
        said = expertctl(*words)
        assert said.err.count("warning: acme/sql@1.0.0: key ") == 1
        assert "`expertctl remove acme/sql@1.0.0` removes it" in said.err
        assert "current" not in said.err
    [notice] = expertctl("update", "--json").document["notices"]
    assert (notice["kind"], notice["in_use"]) == ("revoked", False)
    [entry] = expertctl("outdated", "--json").document["experts"]
    assert not entry["revoked"]
    expertctl("remove", "acme/sql@1.0.0")
    assert "everything is up to date" in expertctl("update").err


def test_an_older_version_whose_key_was_revoked_is_refused_where_it_is_locked(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    install_versions_of_two_keys(expertctl, publisher)
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "1.0.0"\n')
    expertctl("install")
    publisher.revoke("acme", OLD)
    for words in (["update"], ["outdated"], ["install", "--locked"]):
        assert "was revoked" in expertctl(*words, exit_code=TRUST).err


def test_a_registry_that_is_down_is_named_and_keeps_nobody_from_what_is_installed(
    home: Path,
    template: PackageTemplate,
    tmp_path: Path,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = RecordedPauses()
    monkeypatch.setattr(
        "expertctl.registry.http.RetrySchedule",
        lambda tell=None: RetrySchedule(sleep=pauses, tell=tell),
    )
    monkeypatch.chdir(tmp_path)
    with run_publishing_registry(tmp_path / "registry", template) as running:
        running.create_namespace("acme").publish("acme/sql@1.0.0")
        HomeFixture(home).trust.add_registry(running.known)
        monkeypatch.setenv("EXPERT_REGISTRY", running.host)
        expertctl("install", "acme/sql@1.0.0")
        running.yank("acme/sql@1.0.0", "wrong joins")
        expertctl("outdated")
    said = expertctl("install", "acme/sql@1.0.0")
    assert "already installed: acme/sql@1.0.0" in said.out
    assert "was yanked: wrong joins" in said.err  # as it said last
    assert f"{running.host} cannot say whether its key was revoked" in said.err
    assert pauses.seconds == []  # what is here is asked about once, without patience
    notices = expertctl("update", "--json").document["notices"]
    assert [notice["kind"] for notice in notices] == ["yanked", "unchecked"]
    offline = expertctl("update", "--offline", "--json").document["notices"]
    assert [notice["kind"] for notice in offline] == ["yanked"]


def test_a_registry_that_answers_when_it_is_asked_again_has_answered(
    expertctl: CommandRunner,
    home: Path,
    template: PackageTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experts.toml").write_text('[experts]\n"zoo/ants" = "1.0.0"\n')
    index = "/tuf/targets/index/zoo/ants.json"
    with run_hostile_registry(template.make_package("zoo/ants", key=OLD)) as hostile_registry:
        HomeFixture(home).trust.add_registry(hostile_registry.known)
        monkeypatch.setenv("EXPERT_REGISTRY", hostile_registry.host)
        expertctl("lock")

        def once(_: ReceivedRequest) -> Reply:
            del hostile_registry.overrides[index]
            return make_reply(503)

        hostile_registry.overrides[index] = once
        said = expertctl("install", "--locked", "--json")
    assert "cannot say" not in said.err
    assert said.document["notices"] == []


def test_an_old_state_of_our_own_registry_is_warned_of_until_it_is_renewed(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    """As where the registry was off, or something between shows what was true once."""
    registry = publisher.live.served.registry
    with registry.database.write() as connection:
        connection.execute(update(PACKAGES).values(signed=0))
        then = time.time() - 9.5 * DAY
        renew_indexes(connection, signer=registry.index_signer, now=then, max_documents=1)
    said = expertctl("install")
    assert f"the index of acme/sql from {publisher.host} is 9 days old" in said.err
    assert "it is updated every 7 days" in said.err
    renew_index_batch(registry)
    assert "days old" not in expertctl("install").err


def test_what_was_pinned_is_told_and_in_the_document(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    said = expertctl("install", "--json")
    line = f"pinned for acme/* of {publisher.host}: key {OLD.public.key_id} (first install"
    assert said.err.count(line) == 1
    assert said.document["pinned"] == [
        {
            "registry": publisher.host,
            "namespace": "acme",
            "key_id": OLD.public.key_id,
            "vouched": False,
        }
    ]
    assert "pinned" not in expertctl("install").err


def install_versions_of_two_keys(expertctl: CommandRunner, publisher: PublishingRegistry) -> None:
    """Install 1.0.0, and beside it 1.1.0 by a new key, which the old one vouches for."""
    expertctl("install")
    word = sign_key_statement(namespace="acme", new=NEW.public, by=OLD)
    publisher.accept_key("acme", NEW, statement=word).publish("acme/sql@1.1.0", key=NEW)
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "^1.1"\n')
    expertctl("install")


def rotated(publisher: PublishingRegistry, *refs: str) -> None:
    """Publish with a new key, which the old one vouches for, and revoke the old one."""
    word = sign_key_statement(namespace="acme", new=NEW.public, by=OLD)
    publisher.accept_key("acme", NEW, statement=word)
    for ref in refs:
        publisher.publish(ref, key=NEW)
    publisher.revoke("acme", OLD, "laptop stolen")


def test_info_marks_a_version_whose_key_was_revoked_and_shows_one_that_counts(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.2.0")
    rotated(publisher, "acme/sql@1.1.0")
    said = expertctl("info", "acme/sql")
    assert ["shown", "1.1.0"] in [line.split() for line in said.out.splitlines()]
    table = {line.split()[0]: line for line in said.out.split("\n\n")[1].splitlines()}
    assert "key revoked: laptop stolen" in table["1.2.0"]
    assert "revoked" not in table["1.1.0"]
    offer = expertctl("info", "acme/sql", "--json").document["offer"]
    assert {v["version"]: v["revoked"] for v in offer["versions"]} == {
        "1.2.0": "laptop stolen",
        "1.1.0": None,
        "1.0.0": "laptop stolen",
    }
    assert offer["install"] == f"expertctl install {publisher.host}/acme/sql@1.1.0"


def test_info_offers_no_command_for_a_version_that_is_refused(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.revoke("acme", OLD, "laptop stolen")
    said = expertctl("info", "acme/sql@1.0.0").out
    assert "1.0.0 (key revoked: laptop stolen)" in said
    assert "refused, as the key that signed it was revoked" in said
    offer = expertctl("info", "acme/sql@1.0.0", "--json").document["offer"]
    assert (offer["install"], offer["shown"]["revoked"]) == (None, "laptop stolen")


def test_search_marks_a_package_whose_newest_version_is_refused(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    [hit] = expertctl("search", "sql", "--json").document["results"]
    assert (hit["revoked"], hit["signer"]) == (None, OLD.public.key_id)
    publisher.revoke("acme", OLD, "laptop stolen")
    assert "(key revoked: laptop stolen)" in expertctl("search", "sql").out
    [hit] = expertctl("search", "sql", "--json").document["results"]
    assert hit["revoked"] == "laptop stolen"


def test_search_and_info_mark_a_key_that_only_this_machine_revoked(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    user_home.trust.revoke(OLD.public.key_id, "seen in the wild")
    [hit] = expertctl("search", "sql", "--json").document["results"]
    assert hit["revoked"] == "seen in the wild"
    offer = expertctl("info", "acme/sql", "--json").document["offer"]
    assert [v["revoked"] for v in offer["versions"]] == ["seen in the wild"]


def test_info_marks_what_is_installed_and_withdrawn(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    install_versions_of_two_keys(expertctl, publisher)
    publisher.revoke("acme", OLD, "laptop stolen")
    publisher.yank("acme/sql@1.1.0", "wrong joins")
    expertctl("outdated")
    document = expertctl("info", "acme/sql", "--json").document
    facts = {e["version"]: (e["yanked"], e["revoked"], e["used"]) for e in document["installed"]}
    assert facts == {"1.0.0": (None, True, False), "1.1.0": ("wrong joins", False, True)}
    assert (
        f"1.0.0 from {publisher.host}, unused (key revoked), " in expertctl("info", "acme/sql").out
    )


def test_who_finds_only_revoked_versions_is_told_the_way_out(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.revoke("acme", OLD, "laptop stolen")
    exact = expertctl("install", exit_code=TRUST).err
    assert "hint: ask its publisher for a version that is signed with another key\n" in exact
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "^1"\n')
    for words in (["install", "acme/sql"], ["install"], ["lock"]):
        said = expertctl(*words, exit_code=TRUST)
        assert "every version was signed with a key that was revoked" in said.err
        assert "ask for a version that is there" not in said.err


def test_who_finds_only_yanked_versions_is_told_the_way_out(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.1.0")
    publisher.yank("acme/sql@1.0.0", "wrong joins")
    publisher.yank("acme/sql@1.1.0", "worse joins")
    said = expertctl("install", "acme/sql", exit_code=3)
    assert "1.1.0 was yanked: worse joins" in said.err
    assert "hint: every version was yanked: ask its publisher" in said.err
    assert "`expertctl install acme/sql@1.1.0`" in said.err
    expertctl("install", "acme/sql@1.1.0")


def test_who_finds_revoked_and_yanked_versions_is_told_both(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    rotated(publisher, "acme/sql@1.1.0")
    publisher.yank("acme/sql@1.1.0", "wrong joins")
    said = expertctl("install", "acme/sql", exit_code=3)
    assert "hint: every version was yanked, or its key was revoked: " in said.err
    assert "the key of 1.0.0 was revoked" in said.err
