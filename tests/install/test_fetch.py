"""Fetching from registries that lie, stumble or have no index: what travels, what is refused."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.digest import Digest, FileDigest
from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    MissingDependencyError,
    NotFoundError,
    RegistryError,
    TrustError,
)
from expertctl.install.doctor import examine
from expertctl.install.fetch import Arrivals
from expertctl.package.layout import MANIFEST_TYPE, layout_of
from expertctl.registry import http as http_module
from expertctl.registry.index_document import Release
from expertctl.registry.retry import Retries
from expertctl.routing.planner import Planner
from expertctl.schema.manifest import MAX_MANIFEST_BYTES
from tests.install.liar import Liar, lying, with_form
from tests.install.market import Buyer
from tests.install.team import Team
from tests.registry.hostile import Pauses, Request, Stall, reply
from tests.registry_server.publishing.parcels import Parcel, Template
from tests.store.shop import House, a_key


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps between two tries."""
    patient = Retries(attempts=2, sleep=Pauses(), chance=lambda: 1.0)
    monkeypatch.setattr(http_module, "Retries", lambda tell=None: patient)


@pytest.fixture
def one(template: Template) -> Parcel:
    return template.parcel("acme/one", key=a_key("acme"))


@pytest.fixture
def two(template: Template) -> Parcel:
    """It shares every file but its manifest and signature with the first."""
    return template.parcel("acme/two", key=a_key("acme"))


def at(liar: Liar, root: Path) -> Buyer:
    """A buyer who accepted the index key of a registry."""
    buyer = Buyer.at(root)
    if liar.indexed:
        buyer.house.trust.add_registry(liar.known)
    return replace(buyer, settings=replace(buyer.settings, registry=liar.host))


def refuses(buyer: Buyer, error: type[ExpertError], match: str, *refs: str) -> str:
    """It is refused in these words, with a way out, and leaves nothing behind."""
    with pytest.raises(error, match=match) as raised:
        buyer.buy(*refs)
    assert type(raised.value) is error
    assert buyer.refs() == []
    buyer.house.check()
    hint = raised.value.hint
    assert error is InvalidPackageError or len(hint.split()) > 5
    return hint


def test_a_blob_that_two_packages_share_travels_once(home: Path, one: Parcel, two: Parcel) -> None:
    with lying(one, two) as liar:
        buyer = at(liar, home)
        buyer.buy("acme/one", "acme/two")
        blobs = [path.rpartition(":")[2] for path in liar.asked("/blobs/")]
        wanted = {f.digest.hex for p in (one, two) for f in p.layout.layers}
        assert sorted(blobs) == sorted(wanted)
        buyer.house.check()


def test_a_blob_that_the_store_has_does_not_travel(home: Path, one: Parcel, two: Parcel) -> None:
    with lying(one, two) as liar:
        buyer = at(liar, home)
        buyer.buy("acme/one")
        before = len(liar.asked("/blobs/"))
        buyer.buy("acme/two")
        shared = {f.digest for f in one.layout.layers} & {f.digest for f in two.layout.layers}
        assert len(liar.asked("/blobs/")) - before == len(two.layout.layers) - len(shared)
        buyer.house.check()


def test_what_arrived_before_a_failure_does_not_travel_again(home: Path, one: Parcel) -> None:
    last = one.layout.layers[-1]
    path = f"/v2/acme/one/blobs/{last.digest}"
    with lying(one) as liar:
        buyer = at(liar, home)
        liar.answers[path] = lambda _: reply(404)
        refuses(buyer, NotFoundError, f"GET {path}: not there", "acme/one")
        arrived = {p.name for p in (buyer.house.home.registries / "arrived").iterdir()}
        del liar.answers[path]
        before = len(liar.asked("/blobs/"))
        buyer.buy("acme/one")
        again = {p.rpartition(":")[2] for p in liar.asked("/blobs/")[before:]}
        assert not again & arrived
        assert last.digest.hex in again


def test_manifest_bytes_that_are_not_those_of_the_digest_are_refused(
    home: Path, one: Parcel, two: Parcel
) -> None:
    """Attack 94: something moved between resolving and pulling."""
    with lying(one) as liar:
        liar.answers[f"/v2/acme/one/manifests/{one.package_digest}"] = lambda _: reply(
            body=two.layout.manifest, Content_Type=MANIFEST_TYPE
        )
        refuses(at(liar, home), DigestError, "the manifest of acme/one is not", "acme/one")


def test_only_digests_are_asked_for_so_a_moved_tag_moves_nothing(home: Path, one: Parcel) -> None:
    with lying(one) as liar:
        liar.answers["/v2/acme/one/manifests/1.0.0"] = lambda _: reply(500)
        at(liar, home).buy("acme/one")
        assert liar.asked("/manifests/") == [f"/v2/acme/one/manifests/{one.package_digest}"]


def test_an_index_that_names_the_manifest_of_another_content_is_refused(
    home: Path, template: Template, one: Parcel
) -> None:
    """Attack 94: the index says A, the manifest says B."""
    other = template.parcel("acme/one", key=a_key("acme"), description="another")
    with lying(one) as liar:
        liar.change = lambda release: with_form(release, other.package_digest)
        liar.answers[f"/v2/acme/one/manifests/{other.package_digest}"] = lambda _: reply(
            body=other.layout.manifest, Content_Type=MANIFEST_TYPE
        )
        refuses(at(liar, home), DigestError, "names other content than the index", "acme/one")


@pytest.mark.parametrize("field", ["requires", "conflicts", "base"])
def test_an_index_that_says_something_else_than_the_package_is_refused(
    home: Path, one: Parcel, field: str
) -> None:
    with lying(one) as liar:
        buyer = at(liar, home)

        def lie(release: Release) -> Release:
            lies: dict[str, Any] = {
                "requires": ("acme/one@*",),
                "conflicts": ("acme/other",),
                "base": replace(release.base, name="another"),
            }
            return replace(release, **{field: lies[field]})

        liar.change = lie
        refuses(buyer, DigestError, f"something else of its {field}", "acme/one")


def test_another_package_under_this_name_is_refused(home: Path, one: Parcel, two: Parcel) -> None:
    with lying(replace(two, name=one.name)) as liar:
        refuses(at(liar, home), TrustError, r"asked for acme/one@1\.0\.0, but", "acme/one")


def test_a_blob_with_other_bytes_is_refused(home: Path, one: Parcel) -> None:
    file = one.layout.layers[0]
    wrong = bytes(file.size)
    with lying(one) as liar:
        liar.answers[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: reply(body=wrong)
        refuses(at(liar, home), DigestError, "does not have its digest", "acme/one")


def test_a_manifest_that_is_no_package_is_refused(home: Path, one: Parcel) -> None:
    data = one.layout.manifest.replace(b"schemaVersion", b"schemaversion")
    with lying(one) as liar:
        liar.change = lambda release: with_form(release, Digest.of(data))
        liar.answers[f"/v2/acme/one/manifests/{Digest.of(data)}"] = lambda _: reply(
            body=data, Content_Type=MANIFEST_TYPE
        )
        refuses(
            at(liar, home), InvalidPackageError, "the manifest is not the one that its", "acme/one"
        )


def test_a_registry_without_an_index_is_told_with_the_way_out(home: Path, one: Parcel) -> None:
    with lying(one, indexed=False) as liar:
        hint = refuses(at(liar, home), RegistryError, "has no index of experts", "acme/one")
        assert f"{liar.host}/acme/one@sha256:" in hint
        assert f"trust add KEY.pem --namespace acme --registry {liar.host}" in hint


def test_exact_bytes_of_a_plain_registry_are_taken_at_the_persons_word(
    home: Path, one: Parcel
) -> None:
    with lying(one, indexed=False) as liar:
        buyer = at(liar, home)
        ref = f"{liar.host}/acme/one@{one.package_digest}"
        (done,) = buyer.buy(ref).installed
        assert done.expert.signer is None
        assert any("you named its exact bytes" in warning for warning in done.warnings)
        assert any("you named its exact bytes" in warning for warning in done.expert.warnings)
        (again,) = buyer.offline().buy(ref).installed
        assert again.outcome == "already installed"
        buyer.house.check()


def test_damage_to_what_came_from_a_plain_registry_is_made_good_as_doctor_says(
    home: Path, one: Parcel
) -> None:
    with lying(one, indexed=False) as liar:
        buyer, ref = at(liar, home), f"{liar.host}/acme/one@{one.package_digest}"
        (done,) = buyer.buy(ref).installed
        blob = buyer.store.paths.blob(done.expert.file("expert.json").digest)
        blob.chmod(0o644)
        blob.write_bytes(b"changed")
        house: House = buyer.house
        doctor = (house.store, house.bases, house.trust, house.catalogue)

        def broken() -> list[str]:
            store, bases, trust, catalogue = doctor
            found = examine(store, bases=bases, trust=trust, catalogue=catalogue).findings
            return [finding.hint for finding in found if finding.broken]

        assert broken() == [f"install it again: `expertctl install {ref}`"]
        (again,) = buyer.buy(ref).installed
        assert again.warnings[0].startswith("accepted because you named its exact bytes")
        assert broken() == []


def test_exact_bytes_whose_key_is_revoked_later_do_not_run(home: Path, one: Parcel) -> None:
    with lying(one, indexed=False) as liar:
        buyer = at(liar, home)
        buyer.buy(f"{liar.host}/acme/one@{one.package_digest}")
    house = buyer.house
    planner = Planner(
        store=house.store,
        bases=house.bases,
        trust=house.trust,
        catalogue=house.catalogue,
        index=house.index,
        home=house.home,
    )
    assert [e.revoked for e in planner.inventory().experts] == [False]
    house.trust.revoke(a_key("acme").public.key_id, "stolen")
    assert [e.revoked for e in planner.inventory().experts] == [True]
    [file] = [expert.signature for expert in house.store.experts()]
    assert file is not None
    house.store.paths.blob(file.digest).unlink()
    assert [e.revoked for e in planner.inventory().experts] == [False]


def test_an_exact_version_of_a_plain_registry_needs_a_trusted_key(home: Path, one: Parcel) -> None:
    with lying(one, indexed=False) as liar:
        buyer, ref = at(liar, home), f"{liar.host}/acme/one@1.0.0"
        refuses(buyer, RegistryError, "has no index of experts", ref)
        house: House = buyer.house
        house.trust.add(a_key("acme").public, name="acme", namespaces=["acme"], registry=liar.host)
        refuses(buyer, RegistryError, "has no index", f"{liar.host}/acme/one")
        (done,) = buyer.buy(ref).installed
        assert done.expert.signer == a_key("acme").public.key_id
        assert done.expert.registry == liar.host


def test_a_plain_registry_with_another_package_under_the_name_is_refused(
    home: Path, one: Parcel, two: Parcel
) -> None:
    with lying(replace(two, name=one.name), indexed=False) as liar:
        ref = f"{liar.host}/acme/one@{two.package_digest}"
        refuses(at(liar, home), TrustError, "but the package is acme/two", ref)


def test_what_a_package_of_a_plain_registry_requires_must_be_named_too(
    home: Path, template: Template, two: Parcel
) -> None:
    top = template.parcel(
        "acme/top", key=a_key("acme"), composition={"requires": ["acme/two"], "conflicts": []}
    )
    with lying(top, two, indexed=False) as liar:
        buyer = at(liar, home)
        ref = f"{liar.host}/acme/top@{top.package_digest}"
        refuses(buyer, MissingDependencyError, "has no index to find acme/two in", ref)
        buyer.buy(ref, f"{liar.host}/acme/two@{two.package_digest}")
        assert buyer.refs() == ["acme/top@1.0.0", "acme/two@1.0.0"]


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 2_000_000])
def test_a_manifest_of_a_plain_registry_with_lies_in_it_is_refused(
    home: Path, one: Parcel, body: bytes
) -> None:
    (file,) = [file for file in one.layout.files if file.path == "expert.json"]
    with lying(one, indexed=False) as liar:
        liar.answers[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: reply(body=body)
        ref = f"{liar.host}/acme/one@{one.package_digest}"
        refuses(at(liar, home), DigestError, "does not have its digest", ref)


def test_when_one_of_several_cannot_come_none_is_installed(
    home: Path, one: Parcel, two: Parcel
) -> None:
    with lying(one, two) as liar:
        path = f"/v2/acme/two/manifests/{two.package_digest}"
        liar.answers[path] = lambda _: reply(404)
        refuses(at(liar, home), NotFoundError, f"GET {path}: not there", "acme/one", "acme/two")


@pytest.mark.parametrize("part", ["/tuf/", "/manifests/", "/blobs/"])
def test_ctrl_c_ends_an_install_while_a_registry_stalls(
    home: Path, one: Parcel, two: Parcel, part: str
) -> None:
    with lying(one, two) as liar:
        stalled = threading.Barrier(2, lambda: signal.pthread_kill(main, signal.SIGINT), 30)
        main = threading.main_thread().ident or 0

        def stall(_: Request) -> Iterator[Stall]:
            stalled.wait()
            yield Stall()

        for parcel in (one, two):
            [file] = [file for file in parcel.layout.files if file.path == "expert.json"]
            root = f"/v2/{parcel.name}"
            for path in (
                f"/tuf/targets/index/{parcel.name}.json",
                f"{root}/manifests/{parcel.package_digest}",
                f"{root}/blobs/{file.digest}",
            ):
                if part in path:
                    liar.answers[path] = stall
        buyer = at(liar, home)
        with pytest.raises(KeyboardInterrupt):
            buyer.buy(str(one.name), str(two.name))
        assert len([path for path in liar.asked(part) if path in liar.answers]) == 2
        assert buyer.refs() == []
        liar.answers.clear()
        assert len(buyer.buy(str(one.name), str(two.name)).installed) == 2


def test_what_arrived_and_nobody_came_back_for_goes(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path / "arrived")
    arrivals.sweep()
    arrivals.folder.mkdir()
    path = arrivals.path(Digest.of(b"x"))
    path.write_bytes(b"x")
    arrivals.sweep()
    assert path.exists()
    arrivals.sweep(age=0.0)
    assert not path.exists()


def test_a_manifest_of_a_plain_registry_beyond_all_bounds_is_refused(
    home: Path, one: Parcel
) -> None:
    """Nobody reads more than an expert.json may have."""
    kept = [file for file in one.layout.files if file.path != "expert.json"]
    huge = FileDigest("expert.json", MAX_MANIFEST_BYTES + 1, Digest.of(b""))
    layout = layout_of([*kept, huge], one.layout.signature)
    with lying(replace(one, layout=layout), indexed=False) as liar:
        ref = f"{liar.host}/acme/one@{layout.package_digest}"
        refuses(at(liar, home), InvalidPackageError, "expert.json has more than", ref)


def test_a_part_of_a_file_of_a_plain_registry_is_refused(home: Path, one: Parcel) -> None:
    (file,) = [file for file in one.layout.files if file.path == "expert.json"]
    with lying(one, indexed=False) as liar:
        liar.answers[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: reply(206, b"{}")
        ref = f"{liar.host}/acme/one@{one.package_digest}"
        refuses(at(liar, home), RegistryError, "was answered with 206", ref)


def test_a_project_may_use_a_plain_registry_whose_publisher_is_trusted(
    home: Path, one: Parcel, tmp_path: Path
) -> None:
    with lying(one, indexed=False) as liar:
        buyer = at(liar, home)
        text = f'[experts]\n"{liar.host}/acme/one" = "1.0.0"\n'
        team = Team(tmp_path / "project", buyer).wants(text)
        with pytest.raises(TrustError, match="index key of"):
            team.install()
        key = a_key("acme").public
        buyer.house.trust.add(key, name="acme", namespaces=["acme"], registry=liar.host)
        team.lock()
        assert buyer.refs() == []
        (done,) = team.install_locked().installed
        assert (done.expert.ref, done.expert.signer) == ("acme/one@1.0.0", key.key_id)


def test_a_project_cannot_vouch_for_exact_bytes(home: Path, one: Parcel, tmp_path: Path) -> None:
    """What a person may say by hand, a file of a stranger may not."""
    with lying(one, indexed=False) as liar:
        text = f'[experts]\n"{liar.host}/acme/one" = "{one.package_digest}"\n'
        team = Team(tmp_path / "project", at(liar, home)).wants(text)
        with pytest.raises(TrustError, match="index key of"):
            team.install()
        assert liar.asked("/v2/") == []


@pytest.mark.parametrize("how", ["install", "lock", "install_locked"])
def test_a_project_cannot_take_a_namespace_to_a_plain_registry(
    home: Path, one: Parcel, two: Parcel, tmp_path: Path, how: str
) -> None:
    """Its publisher is trusted everywhere, but there nobody says that a version was yanked."""
    with lying(two) as usual, lying(one, indexed=False) as plain:
        buyer = at(usual, home)
        team = Team(tmp_path / "project", buyer)
        team.wants(f'[experts]\n"{plain.host}/acme/one" = "1.0.0"\n')
        buyer.house.trust.add(a_key("acme").public, name="acme", namespaces=["acme"])
        team.lock()
        buyer.buy("acme/two")
        plain.running.seen.clear()
        with pytest.raises(TrustError, match=f"but it belongs to {usual.host}") as refused:
            getattr(team, how)()
        assert plain.running.seen == []
        assert refused.value.hint.endswith(f"`expertctl install {plain.host}/acme/one@1.0.0`")
        (done,) = buyer.buy(f"{plain.host}/acme/one@1.0.0").installed
        assert done.expert.registry == plain.host


def test_what_came_from_a_plain_registry_is_not_compared(
    home: Path, one: Parcel, two: Parcel, tmp_path: Path
) -> None:
    """Nothing there tells what is newer; a lock file that names it sends nobody there."""
    with lying(two) as usual, lying(one, indexed=False) as plain:
        buyer = at(usual, home)
        buyer.buy(f"{plain.host}/acme/one@{one.package_digest}", "acme/two")
        plain.running.seen.clear()
        (standing,) = Team(tmp_path / "nowhere", buyer).outdated()
        assert (str(standing.package), standing.is_behind) == ("acme/two", False)
        assert plain.running.seen == []


@pytest.mark.parametrize("what", ["its files have", "its manifest has"])
def test_an_index_that_states_another_size_is_refused_before_anything_large_comes(
    home: Path, one: Parcel, what: str
) -> None:
    def wrong(release: Release) -> Release:
        if what == "its files have":
            return replace(release, size=release.size + 1)
        return replace(release, forms=(replace(release.forms[0], size=1),))

    with lying(one) as liar:
        liar.change = wrong
        refuses(at(liar, home), DigestError, f"{what} [0-9,]+ bytes, the index says", "acme/one")
        assert liar.asked("/blobs/") == []


TOKEN = f"xpt_{'a' * 43}"


@pytest.mark.parametrize(
    ("readme", "problem"),
    [
        (f"login with {TOKEN}".encode(), "README.md: holds an access token"),
        (b"-----BEGIN PRIVATE KEY-----\nMC4", "README.md: holds a private key"),
        ("für alle".encode("latin-1"), "README.md: not UTF-8 at byte 1"),
    ],
    ids=["token", "key", "latin-1"],
)
def test_a_readme_that_should_never_have_been_published_is_refused(
    home: Path, template: Template, readme: bytes, problem: str
) -> None:
    """A registry of another kind, or one that was made to, carries it; the signature is right."""
    with lying(template.parcel("acme/one", key=a_key("acme"), files={"README.md": readme})) as liar:
        buyer = at(liar, home)
        refuses(buyer, InvalidPackageError, problem, "acme/one")
        assert not buyer.house.trust.read().is_pinned(liar.host, "acme")
