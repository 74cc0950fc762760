"""Any sequence of publishes, signatures, yanks, keys, collections and restarts, beside a model.

After every step the index is read with the client's own code and must say what the model says;
after every collection each package digest that the index ever named must be pulled whole.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event

from expertctl.errors import ConflictError, NotFoundError, RevokedError, TrustError
from expertctl.reference import PackageName, Version
from expertctl.registry.index_document import IndexDocument
from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.keys import PrivateKey
from registry_server.operation.gc import find_garbage, remove_garbage
from registry_server.publishing.releases import add_key, revoke_key, unyank_release, yank_release
from registry_server.registry import Registry
from tests.registry_server.harness import create_registry, make_settings
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    pull_package,
    read_published_index,
    upload_and_publish,
    upload_blobs,
)

pytestmark = pytest.mark.all

NAMES = st.sampled_from(["acme/sql", "acme/chat"])
VERSIONS = st.sampled_from(["1.10.0-rc.1", "1.10.0", "1.9.0"])
CONTENTS = st.sampled_from(["first", "second"])
WHO = st.integers(0, 2)
PICK = st.integers(0, 99)
KEYS = [PrivateKey.generate() for _ in range(3)]
FAR = 4e9
"""A time at which everything is old."""


@dataclass
class ModelRelease:
    content: str
    forms: list[int]
    yanked: str | None = None


@dataclass
class ModelPackage:
    revision: int = 0
    releases: dict[str, ModelRelease] = field(default_factory=dict)


@dataclass
class PublishingModel:
    """What should be there."""

    added: set[int] = field(default_factory=set)
    revoked: dict[int, str] = field(default_factory=dict)
    packages: dict[str, ModelPackage] = field(default_factory=dict)

    def touch_all(self) -> None:
        for package in self.packages.values():
            package.revision += 1

    def publish(self, name: str, version: str, content: str, who: int) -> bool | type[Exception]:
        """Return whether it changes anything, or how it is refused."""
        if who not in self.added:
            return TrustError
        if who in self.revoked:
            return RevokedError
        package = self.packages.get(name) or ModelPackage()
        release = package.releases.get(version)
        if release is None:
            package.releases[version] = ModelRelease(content, [who])
        elif release.content != content:
            return ConflictError
        elif who not in release.forms:
            release.forms.append(who)
        elif release.forms[-1] in self.revoked:
            release.forms.remove(who)
            release.forms.append(who)
        else:
            return False
        package.revision += 1
        self.packages[name] = package
        return True


class Publishing(RuleBasedStateMachine):
    """A registry beside its model."""

    template: PackageTemplate

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.served = create_registry(make_settings(self.folder / "registry"))
        self.hurry()
        self.owner = self.served.authenticate(self.served.create_user("olga"))
        self.served.create_namespace("acme", kind="expert", owner="olga")
        self.model = PublishingModel()
        self.shipped: dict[tuple[str, str, int], InMemoryPackage] = {}
        for who in (0, 1):
            self.add_key(who, None)
        self.publish("acme/sql", "1.9.0", "first", 0)

    @property
    def registry(self) -> Registry:
        return self.served.registry

    def hurry(self) -> None:
        """Do not wait for the disk: nobody cuts the power here."""
        engine = self.registry.database._engine
        event.listen(engine, "checkout", lambda c, *_: c.execute("PRAGMA synchronous=OFF"))

    def teardown(self) -> None:
        self.served.close()
        shutil.rmtree(self.folder)

    def make_package(self, name: str, version: str, content: str, who: int) -> InMemoryPackage:
        return self.template.make_package(name, version, key=KEYS[who], description=content)

    @rule(who=WHO, voucher=st.none() | WHO)
    def key(self, who: int, voucher: int | None) -> None:
        self.add_key(who, voucher)

    def add_key(self, who: int, voucher: int | None) -> None:
        key = KEYS[who].public
        statement = None
        usable = self.model.added - self.model.revoked.keys() - {who}
        if voucher in usable:
            statement = sign_key_statement(namespace="acme", new=key, by=KEYS[voucher])
        arguments: dict[str, Any] = {"public_key": key.pem(), "statement": statement}
        if who in self.model.revoked:
            with pytest.raises(RevokedError):
                add_key(self.registry, self.owner, namespace="acme", **arguments)
            return
        known = self.statement_of(who)
        added = add_key(self.registry, self.owner, namespace="acme", **arguments)
        assert added.vouched_by == (KEYS[voucher].public.key_id if statement else added.vouched_by)
        if who not in self.model.added or statement not in {None, known}:
            self.model.touch_all()
        self.model.added.add(who)

    def statement_of(self, who: int) -> bytes | None:
        for name in self.model.packages:
            for entry in read_published_index(self.registry, self.owner, name).keys:
                if entry.key.key_id == KEYS[who].public.key_id:
                    return entry.statement
        return None

    @rule(who=WHO, reason=st.sampled_from(["lost", "stolen"]))
    def revoke_key(self, who: int, reason: str) -> None:
        key_id = KEYS[who].public.key_id
        if who not in self.model.added:
            with pytest.raises(NotFoundError):
                revoke_key(
                    self.registry, self.owner, namespace="acme", key_id=key_id, reason=reason
                )
            return
        revoke_key(self.registry, self.owner, namespace="acme", key_id=key_id, reason=reason)
        if who not in self.model.revoked:
            self.model.revoked[who] = reason
            self.model.touch_all()

    @rule(name=NAMES, version=VERSIONS, content=CONTENTS, pick=PICK)
    def publish_new(self, name: str, version: str, content: str, pick: int) -> None:
        self.publish(name, version, content, self.signer(pick))

    def signer(self, pick: int) -> int:
        """Mostly a key that counts, or any."""
        usable = sorted(self.model.added - self.model.revoked.keys()) * 3
        return [*usable, 0, 1, 2][pick % (len(usable) + 3)]

    def publish(self, name: str, version: str, content: str, who: int) -> None:
        parcel = self.make_package(name, version, content, who)
        expected = self.model.publish(name, version, content, who)
        if isinstance(expected, bool):
            assert upload_and_publish(self.registry, self.owner, parcel).created == expected
            self.shipped[name, version, who] = parcel
            return
        with pytest.raises(expected):
            upload_and_publish(self.registry, self.owner, parcel)

    @rule(pick=PICK, key=PICK)
    def sign_again(self, pick: int, key: int) -> None:
        name, version, release = self.picked(pick)
        self.publish(name, version, release.content, self.signer(key))

    def picked(self, pick: int) -> tuple[str, str, ModelRelease]:
        """One of the releases that are there."""
        there = [
            (name, version, release)
            for name, package in sorted(self.model.packages.items())
            for version, release in sorted(package.releases.items())
        ]
        return there[pick % len(there)]

    @rule(name=NAMES, version=VERSIONS, content=CONTENTS)
    def only_upload(self, name: str, version: str, content: str) -> None:
        upload_blobs(self.registry, self.make_package(name, version, content, 0))

    @rule(pick=PICK, reason=st.none() | st.sampled_from(["bad", "worse"]))
    def yank(self, pick: int, reason: str | None) -> None:
        name, version, release = self.picked(pick)
        parsed = PackageName.parse(name)
        if reason is None:
            unyank_release(self.registry, self.owner, name=parsed, version=version)
        else:
            yank_release(self.registry, self.owner, name=parsed, version=version, reason=reason)
        self.model.packages[name].revision += release.yanked != reason
        release.yanked = reason

    @rule()
    def collect(self) -> None:
        expected = find_garbage(self.registry, now=FAR)
        assert remove_garbage(self.registry, now=FAR) == expected
        self.registry.check_integrity()
        needed = {
            str(digest)
            for (name, version, who), parcel in self.shipped.items()
            for digest in parcel.blobs
            if who in self.model.packages[name].releases[version].forms
        }
        assert {str(blob.digest) for blob in self.registry.storage.list_blobs()} == needed
        for parcel in self.shipped.values():
            contents = pull_package(self.registry, parcel.name, parcel.package_digest)
            assert contents.content_digest == parcel.content_digest

    @rule()
    def restart(self) -> None:
        self.served = self.served.reopen()
        self.hurry()

    @invariant()
    def the_index_says_what_the_model_says(self) -> None:
        for name, package in self.model.packages.items():
            self.compare(read_published_index(self.registry, self.owner, name), package)

    def compare(self, index: IndexDocument, package: ModelPackage) -> None:
        assert index.revision == package.revision
        versions = sorted(package.releases, key=Version.parse)
        assert [str(release.version) for release in index.releases] == versions
        for release in index.releases:
            expected = package.releases[str(release.version)]
            assert release.description == expected.content
            assert release.yanked == expected.yanked
            signers = [KEYS[who].public.key_id for who in expected.forms]
            assert [form.signer for form in release.forms] == signers
        live = self.model.added - self.model.revoked.keys()
        assert {k.key.key_id for k in index.keys} == {KEYS[who].public.key_id for who in live}
        assert {(r.key_id, r.reason) for r in index.revoked} == {
            (KEYS[who].public.key_id, reason) for who, reason in self.model.revoked.items()
        }


def test_every_history_ends_in_an_index_that_tells_it(template: PackageTemplate) -> None:
    machine = type("Machine", (Publishing,), {"template": template})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.all
def test_many_more_histories(template: PackageTemplate) -> None:
    machine = type("Machine", (Publishing,), {"template": template})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
