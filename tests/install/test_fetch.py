"""Fetching from registries that lie, stumble or have no index: what travels, what is refused."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    MissingDependencyError,
    NotFoundError,
    RegistryError,
    TrustError,
)
from expertctl.install.doctor import examine_store
from expertctl.install.fetch import DownloadCache
from expertctl.package.layout import MANIFEST_TYPE, build_layout
from expertctl.reference import Digest, FileDigest
from expertctl.registry import http as http_module
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.index_document import Release
from expertctl.routing.planner import Planner
from expertctl.schema.manifest import MAX_MANIFEST_BYTES
from tests.install.fixtures import InstallClient, ProjectFixture
from tests.registry.hostile_registry import (
    HostileRegistry,
    ReceivedRequest,
    RecordedPauses,
    StallMarker,
    make_reply,
    replace_form,
    run_hostile_registry,
)
from tests.registry_server.publishing.package_fixtures import InMemoryPackage, PackageTemplate
from tests.store.fixtures import HomeFixture, make_key


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps between two tries."""
    patient = RetrySchedule(attempts=2, sleep=RecordedPauses(), jitter=lambda: 1.0)
    monkeypatch.setattr(http_module, "RetrySchedule", lambda tell=None: patient)


@pytest.fixture
def one(template: PackageTemplate) -> InMemoryPackage:
    return template.make_package("acme/one", key=make_key("acme"))


@pytest.fixture
def two(template: PackageTemplate) -> InMemoryPackage:
    """It shares every file but its manifest and signature with the first."""
    return template.make_package("acme/two", key=make_key("acme"))


def at(hostile_registry: HostileRegistry, root: Path) -> InstallClient:
    """A buyer who accepted the index key of a registry."""
    buyer = InstallClient.create(root)
    if hostile_registry.is_indexed:
        buyer.user_home.trust.add_registry(hostile_registry.known)
    return replace(buyer, settings=replace(buyer.settings, registry=hostile_registry.host))


def refuses(buyer: InstallClient, error: type[ExpertError], match: str, *refs: str) -> str:
    """It is refused in these words, with a way out, and leaves nothing behind."""
    with pytest.raises(error, match=match) as raised:
        buyer.install(*refs)
    assert type(raised.value) is error
    assert buyer.refs() == []
    buyer.user_home.check_integrity()
    hint = raised.value.hint
    assert error is InvalidPackageError or len(hint.split()) > 5
    return hint


def test_a_blob_that_two_packages_share_travels_once(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    with run_hostile_registry(one, two) as hostile_registry:
        buyer = at(hostile_registry, home)
        buyer.install("acme/one", "acme/two")
        blobs = [path.rpartition(":")[2] for path in hostile_registry.list_requests("/blobs/")]
        wanted = {f.digest.hex for p in (one, two) for f in p.layout.layers}
        assert sorted(blobs) == sorted(wanted)
        buyer.user_home.check_integrity()


def test_a_blob_that_the_store_has_does_not_travel(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    with run_hostile_registry(one, two) as hostile_registry:
        buyer = at(hostile_registry, home)
        buyer.install("acme/one")
        before = len(hostile_registry.list_requests("/blobs/"))
        buyer.install("acme/two")
        shared = {f.digest for f in one.layout.layers} & {f.digest for f in two.layout.layers}
        assert len(hostile_registry.list_requests("/blobs/")) - before == len(
            two.layout.layers
        ) - len(shared)
        buyer.user_home.check_integrity()


def test_what_arrived_before_a_failure_does_not_travel_again(
    home: Path, one: InMemoryPackage
) -> None:
    last = one.layout.layers[-1]
    path = f"/v2/acme/one/blobs/{last.digest}"
    with run_hostile_registry(one) as hostile_registry:
        buyer = at(hostile_registry, home)
        hostile_registry.overrides[path] = lambda _: make_reply(404)
        refuses(buyer, NotFoundError, f"GET {path}: not found", "acme/one")
        arrived = {p.name for p in (buyer.user_home.home.registries / "arrived").iterdir()}
        del hostile_registry.overrides[path]
        before = len(hostile_registry.list_requests("/blobs/"))
        buyer.install("acme/one")
        again = {p.rpartition(":")[2] for p in hostile_registry.list_requests("/blobs/")[before:]}
        assert not again & arrived
        assert last.digest.hex in again


def test_manifest_bytes_that_are_not_those_of_the_digest_are_refused(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    """Attack 94: something moved between resolving and pulling."""
    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.overrides[f"/v2/acme/one/manifests/{one.package_digest}"] = lambda _: (
            make_reply(body=two.layout.manifest, Content_Type=MANIFEST_TYPE)
        )
        refuses(
            at(hostile_registry, home), DigestError, "the manifest of acme/one is not", "acme/one"
        )


def test_only_digests_are_asked_for_so_a_moved_tag_moves_nothing(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.overrides["/v2/acme/one/manifests/1.0.0"] = lambda _: make_reply(500)
        at(hostile_registry, home).install("acme/one")
        assert hostile_registry.list_requests("/manifests/") == [
            f"/v2/acme/one/manifests/{one.package_digest}"
        ]


def test_an_index_that_names_the_manifest_of_another_content_is_refused(
    home: Path, template: PackageTemplate, one: InMemoryPackage
) -> None:
    """Attack 94: the index says A, the manifest says B."""
    other = template.make_package("acme/one", key=make_key("acme"), description="another")
    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.edit_release = lambda release: replace_form(release, other.package_digest)
        hostile_registry.overrides[f"/v2/acme/one/manifests/{other.package_digest}"] = lambda _: (
            make_reply(body=other.layout.manifest, Content_Type=MANIFEST_TYPE)
        )
        refuses(
            at(hostile_registry, home),
            DigestError,
            "names other content than the index",
            "acme/one",
        )


@pytest.mark.parametrize("field", ["requires", "conflicts", "base"])
def test_an_index_that_says_something_else_than_the_package_is_refused(
    home: Path, one: InMemoryPackage, field: str
) -> None:
    with run_hostile_registry(one) as hostile_registry:
        buyer = at(hostile_registry, home)

        def lie(release: Release) -> Release:
            lies: dict[str, Any] = {
                "requires": ("acme/one@*",),
                "conflicts": ("acme/other",),
                "base": replace(release.base, name="another"),
            }
            return replace(release, **{field: lies[field]})

        hostile_registry.edit_release = lie
        refuses(buyer, DigestError, f"something else of its {field}", "acme/one")


def test_another_package_under_this_name_is_refused(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    with run_hostile_registry(replace(two, name=one.name)) as hostile_registry:
        refuses(
            at(hostile_registry, home), TrustError, r"asked for acme/one@1\.0\.0, but", "acme/one"
        )


def test_a_blob_with_other_bytes_is_refused(home: Path, one: InMemoryPackage) -> None:
    file = one.layout.layers[0]
    wrong = bytes(file.size)
    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.overrides[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: make_reply(
            body=wrong
        )
        refuses(at(hostile_registry, home), DigestError, "does not have its digest", "acme/one")


def test_a_manifest_that_is_no_package_is_refused(home: Path, one: InMemoryPackage) -> None:
    data = one.layout.manifest.replace(b"schemaVersion", b"schemaversion")
    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.edit_release = lambda release: replace_form(release, Digest.compute(data))
        hostile_registry.overrides[f"/v2/acme/one/manifests/{Digest.compute(data)}"] = lambda _: (
            make_reply(body=data, Content_Type=MANIFEST_TYPE)
        )
        refuses(
            at(hostile_registry, home),
            InvalidPackageError,
            "the manifest is not the one that its",
            "acme/one",
        )


def test_a_registry_without_an_index_is_told_with_the_way_out(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        hint = refuses(
            at(hostile_registry, home), RegistryError, "has no index of experts", "acme/one"
        )
        assert f"{hostile_registry.host}/acme/one@sha256:" in hint
        assert f"trust add KEY.pem --namespace acme --registry {hostile_registry.host}" in hint


def test_exact_bytes_of_a_plain_registry_are_taken_at_the_persons_word(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        buyer = at(hostile_registry, home)
        ref = f"{hostile_registry.host}/acme/one@{one.package_digest}"
        (done,) = buyer.install(ref).installed
        assert done.expert.signer is None
        assert any("you named its exact bytes" in warning for warning in done.warnings)
        assert any("you named its exact bytes" in warning for warning in done.expert.warnings)
        (again,) = buyer.offline().install(ref).installed
        assert again.outcome == "already installed"
        buyer.user_home.check_integrity()


def test_damage_to_what_came_from_a_plain_registry_is_made_good_as_doctor_says(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        buyer, ref = (
            at(hostile_registry, home),
            f"{hostile_registry.host}/acme/one@{one.package_digest}",
        )
        (done,) = buyer.install(ref).installed
        blob = buyer.store.paths.blob(done.expert.find_file("expert.json").digest)
        blob.chmod(0o644)
        blob.write_bytes(b"changed")
        user_home: HomeFixture = buyer.user_home
        doctor = (user_home.store, user_home.bases, user_home.trust, user_home.catalogue)

        def broken() -> list[str]:
            store, bases, trust, catalogue = doctor
            found = examine_store(store, bases=bases, trust=trust, catalogue=catalogue).findings
            return [finding.hint for finding in found if finding.broken]

        assert broken() == [f"install it again: `expertctl install {ref}`"]
        (again,) = buyer.install(ref).installed
        assert again.warnings[0].startswith("accepted because you named its exact bytes")
        assert broken() == []


def test_exact_bytes_whose_key_is_revoked_later_do_not_run(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        buyer = at(hostile_registry, home)
        buyer.install(f"{hostile_registry.host}/acme/one@{one.package_digest}")
    user_home = buyer.user_home
    planner = Planner(
        store=user_home.store,
        bases=user_home.bases,
        trust=user_home.trust,
        catalogue=user_home.catalogue,
        index=user_home.index,
        home=user_home.home,
    )
    assert [e.revoked for e in planner.read_inventory().experts] == [False]
    user_home.trust.revoke(make_key("acme").public.key_id, "stolen")
    assert [e.revoked for e in planner.read_inventory().experts] == [True]
    [file] = [expert.signature for expert in user_home.store.list_experts()]
    assert file is not None
    user_home.store.paths.blob(file.digest).unlink()
    assert [e.revoked for e in planner.read_inventory().experts] == [False]


def test_an_exact_version_of_a_plain_registry_needs_a_trusted_key(
    home: Path, one: InMemoryPackage
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        buyer, ref = at(hostile_registry, home), f"{hostile_registry.host}/acme/one@1.0.0"
        refuses(buyer, RegistryError, "has no index of experts", ref)
        user_home: HomeFixture = buyer.user_home
        user_home.trust.add(
            make_key("acme").public,
            name="acme",
            namespaces=["acme"],
            registry=hostile_registry.host,
        )
        refuses(buyer, RegistryError, "has no index", f"{hostile_registry.host}/acme/one")
        (done,) = buyer.install(ref).installed
        assert done.expert.signer == make_key("acme").public.key_id
        assert done.expert.registry == hostile_registry.host


def test_a_plain_registry_with_another_package_under_the_name_is_refused(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    with run_hostile_registry(replace(two, name=one.name), is_indexed=False) as hostile_registry:
        ref = f"{hostile_registry.host}/acme/one@{two.package_digest}"
        refuses(at(hostile_registry, home), TrustError, "but the package is acme/two", ref)


def test_what_a_package_of_a_plain_registry_requires_must_be_named_too(
    home: Path, template: PackageTemplate, two: InMemoryPackage
) -> None:
    top = template.make_package(
        "acme/top", key=make_key("acme"), composition={"requires": ["acme/two"], "conflicts": []}
    )
    with run_hostile_registry(top, two, is_indexed=False) as hostile_registry:
        buyer = at(hostile_registry, home)
        ref = f"{hostile_registry.host}/acme/top@{top.package_digest}"
        refuses(buyer, MissingDependencyError, "has no index to find acme/two in", ref)
        buyer.install(ref, f"{hostile_registry.host}/acme/two@{two.package_digest}")
        assert buyer.refs() == ["acme/top@1.0.0", "acme/two@1.0.0"]


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 2_000_000])
def test_a_manifest_of_a_plain_registry_with_lies_in_it_is_refused(
    home: Path, one: InMemoryPackage, body: bytes
) -> None:
    (file,) = [file for file in one.layout.files if file.path == "expert.json"]
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        hostile_registry.overrides[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: make_reply(
            body=body
        )
        ref = f"{hostile_registry.host}/acme/one@{one.package_digest}"
        refuses(at(hostile_registry, home), DigestError, "does not have its digest", ref)


def test_when_one_of_several_cannot_come_none_is_installed(
    home: Path, one: InMemoryPackage, two: InMemoryPackage
) -> None:
    with run_hostile_registry(one, two) as hostile_registry:
        path = f"/v2/acme/two/manifests/{two.package_digest}"
        hostile_registry.overrides[path] = lambda _: make_reply(404)
        refuses(
            at(hostile_registry, home),
            NotFoundError,
            f"GET {path}: not found",
            "acme/one",
            "acme/two",
        )


@pytest.mark.parametrize("part", ["/tuf/", "/manifests/", "/blobs/"])
def test_ctrl_c_ends_an_install_while_a_registry_stalls(
    home: Path, one: InMemoryPackage, two: InMemoryPackage, part: str
) -> None:
    with run_hostile_registry(one, two) as hostile_registry:
        stalled = threading.Barrier(2, lambda: signal.pthread_kill(main, signal.SIGINT), 30)
        main = threading.main_thread().ident or 0

        def stall(_: ReceivedRequest) -> Iterator[StallMarker]:
            stalled.wait()
            yield StallMarker()

        for parcel in (one, two):
            [file] = [file for file in parcel.layout.files if file.path == "expert.json"]
            root = f"/v2/{parcel.name}"
            for path in (
                f"/tuf/targets/index/{parcel.name}.json",
                f"{root}/manifests/{parcel.package_digest}",
                f"{root}/blobs/{file.digest}",
            ):
                if part in path:
                    hostile_registry.overrides[path] = stall
        buyer = at(hostile_registry, home)
        with pytest.raises(KeyboardInterrupt):
            buyer.install(str(one.name), str(two.name))
        assert (
            len(
                [
                    path
                    for path in hostile_registry.list_requests(part)
                    if path in hostile_registry.overrides
                ]
            )
            == 2
        )
        assert buyer.refs() == []
        hostile_registry.overrides.clear()
        assert len(buyer.install(str(one.name), str(two.name)).installed) == 2


def test_what_arrived_and_nobody_came_back_for_goes(tmp_path: Path) -> None:
    arrivals = DownloadCache(tmp_path / "arrived")
    arrivals.sweep()
    arrivals.folder.mkdir()
    path = arrivals.path(Digest.compute(b"x"))
    path.write_bytes(b"x")
    arrivals.sweep()
    assert path.exists()
    os.utime(path, (0, 0))
    arrivals.sweep()
    assert not path.exists()


def test_a_manifest_of_a_plain_registry_beyond_all_bounds_is_refused(
    home: Path, one: InMemoryPackage
) -> None:
    """Nobody reads more than an expert.json may have."""
    kept = [file for file in one.layout.files if file.path != "expert.json"]
    huge = FileDigest("expert.json", MAX_MANIFEST_BYTES + 1, Digest.compute(b""))
    layout = build_layout([*kept, huge], one.layout.signature)
    with run_hostile_registry(replace(one, layout=layout), is_indexed=False) as hostile_registry:
        ref = f"{hostile_registry.host}/acme/one@{layout.package_digest}"
        refuses(at(hostile_registry, home), InvalidPackageError, "expert.json has more than", ref)


def test_a_part_of_a_file_of_a_plain_registry_is_refused(home: Path, one: InMemoryPackage) -> None:
    (file,) = [file for file in one.layout.files if file.path == "expert.json"]
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        hostile_registry.overrides[f"/v2/acme/one/blobs/{file.digest}"] = lambda _: make_reply(
            206, b"{}"
        )
        ref = f"{hostile_registry.host}/acme/one@{one.package_digest}"
        refuses(at(hostile_registry, home), RegistryError, "was answered with 206", ref)


def test_a_project_may_use_a_plain_registry_whose_publisher_is_trusted(
    home: Path, one: InMemoryPackage, tmp_path: Path
) -> None:
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        buyer = at(hostile_registry, home)
        text = f'[experts]\n"{hostile_registry.host}/acme/one" = "1.0.0"\n'
        team = ProjectFixture(tmp_path / "project", buyer).write_project(text)
        with pytest.raises(TrustError, match="index key of"):
            team.install()
        key = make_key("acme").public
        buyer.user_home.trust.add(
            key, name="acme", namespaces=["acme"], registry=hostile_registry.host
        )
        team.lock()
        assert buyer.refs() == []
        (done,) = team.install_locked().installed
        assert (done.expert.ref, done.expert.signer) == ("acme/one@1.0.0", key.key_id)


def test_a_project_cannot_vouch_for_exact_bytes(
    home: Path, one: InMemoryPackage, tmp_path: Path
) -> None:
    """What a person may say by hand, a file of a stranger may not."""
    with run_hostile_registry(one, is_indexed=False) as hostile_registry:
        text = f'[experts]\n"{hostile_registry.host}/acme/one" = "{one.package_digest}"\n'
        team = ProjectFixture(tmp_path / "project", at(hostile_registry, home)).write_project(text)
        with pytest.raises(TrustError, match="index key of"):
            team.install()
        assert hostile_registry.list_requests("/v2/") == []


@pytest.mark.parametrize("how", ["install", "lock", "install_locked"])
def test_a_project_cannot_take_a_namespace_to_a_plain_registry(
    home: Path, one: InMemoryPackage, two: InMemoryPackage, tmp_path: Path, how: str
) -> None:
    """Its publisher is trusted everywhere, but there nobody says that a version was yanked."""
    with run_hostile_registry(two) as usual, run_hostile_registry(one, is_indexed=False) as plain:
        buyer = at(usual, home)
        team = ProjectFixture(tmp_path / "project", buyer)
        team.write_project(f'[experts]\n"{plain.host}/acme/one" = "1.0.0"\n')
        buyer.user_home.trust.add(make_key("acme").public, name="acme", namespaces=["acme"])
        team.lock()
        buyer.install("acme/two")
        plain.hostile_server.requests.clear()
        with pytest.raises(TrustError, match=f"but it belongs to {usual.host}") as refused:
            getattr(team, how)()
        assert plain.hostile_server.requests == []
        assert refused.value.hint.endswith(f"`expertctl install {plain.host}/acme/one@1.0.0`")
        (done,) = buyer.install(f"{plain.host}/acme/one@1.0.0").installed
        assert done.expert.registry == plain.host


def test_what_came_from_a_plain_registry_is_not_compared(
    home: Path, one: InMemoryPackage, two: InMemoryPackage, tmp_path: Path
) -> None:
    """Nothing there tells what is newer; a lock file that names it sends nobody there."""
    with run_hostile_registry(two) as usual, run_hostile_registry(one, is_indexed=False) as plain:
        buyer = at(usual, home)
        buyer.install(f"{plain.host}/acme/one@{one.package_digest}", "acme/two")
        plain.hostile_server.requests.clear()
        (standing,) = ProjectFixture(tmp_path / "nowhere", buyer).outdated()
        assert (str(standing.package), standing.is_behind) == ("acme/two", False)
        assert plain.hostile_server.requests == []


@pytest.mark.parametrize("what", ["its files have", "its manifest has"])
def test_an_index_that_states_another_size_is_refused_before_anything_large_comes(
    home: Path, one: InMemoryPackage, what: str
) -> None:
    def wrong(release: Release) -> Release:
        if what == "its files have":
            return replace(release, size=release.size + 1)
        return replace(release, forms=(replace(release.forms[0], size=1),))

    with run_hostile_registry(one) as hostile_registry:
        hostile_registry.edit_release = wrong
        refuses(
            at(hostile_registry, home),
            DigestError,
            f"{what} [0-9,]+ bytes, the index says",
            "acme/one",
        )
        assert hostile_registry.list_requests("/blobs/") == []


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
    home: Path, template: PackageTemplate, readme: bytes, problem: str
) -> None:
    """A registry of another kind, or one that was made to, carries it; the signature is right."""
    with run_hostile_registry(
        template.make_package("acme/one", key=make_key("acme"), files={"README.md": readme})
    ) as hostile_registry:
        buyer = at(hostile_registry, home)
        refuses(buyer, InvalidPackageError, problem, "acme/one")
        assert not buyer.user_home.trust.read().is_pinned(hostile_registry.host, "acme")
