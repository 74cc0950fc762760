"""A process that changes the store is killed, or the disk fails, at every single step."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertctl.errors import DiskFullError, StoreError
from expertctl.install.installer import install_set
from expertctl.store.store import Store
from tests.package.forged_packages import (
    list_set_members,
    make_archive,
    read_archive,
    read_packed_files,
    write_frame,
)
from tests.store.fault_injection import DiskStep, Fault, FaultResult, SpawnedProcess, run_with_fault
from tests.store.fixtures import HomeFixture, PackageFactory

pytestmark = pytest.mark.all

Action = Callable[[HomeFixture], object]


class Sweep:
    """One action on copies of one house; what is true before and after it, and how to repeat it."""

    def __init__(self, template: HomeFixture, action: Action, folder: Path) -> None:
        self.template, self.action, self.folder = template, action, folder
        self.before = content(template)
        user_home = self.fresh()
        self.whole = run_with_fault(lambda: self.action(user_home))
        assert not self.whole.errors, self.whole.trace
        self.after = content(user_home)
        assert self.after != self.before

    def fresh(self) -> HomeFixture:
        return self.copied(self.template, self.folder)

    @staticmethod
    def copied(template: HomeFixture, folder: Path) -> HomeFixture:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template.root, folder)
        return HomeFixture(folder)

    def at(self, step: int, fault: Fault) -> tuple[HomeFixture, FaultResult]:
        user_home = self.fresh()
        return user_home, run_with_fault(lambda: self.action(user_home), at=step, fault=fault)

    def steps(self) -> list[tuple[int, DiskStep]]:
        return list(enumerate(self.whole.steps, start=1))


def content(user_home: HomeFixture) -> dict[str, bytes]:
    """What is installed: every ref and the bytes of every file that it names."""
    store = user_home.store
    return {
        f"{expert.ref} {file.path}": store.blob_path(file.digest).read_bytes()
        for expert in store.list_experts()
        for file in expert.layers
    }


def settle(user_home: HomeFixture) -> None:
    """Collect everything that a killed process left, whatever its age."""
    with user_home.store.begin_transaction() as changes:
        changes.collect_garbage(age=0)


def exact(user_home: HomeFixture) -> None:
    """Nothing is in the store but what is installed."""
    store = user_home.store
    needed = {file.digest.hex for e in store.list_experts() for file in e.layers}
    assert {path.name for path in store.paths.blobs.iterdir()} == needed
    assert list(store.paths.staging.iterdir()) == []
    files = [p.name for p in store.paths.refs.rglob("*") if p.is_file()]
    assert len(files) == len(store.list_experts())


def assert_whole(user_home: HomeFixture, sweep: Sweep, states: list[dict[str, bytes]]) -> None:
    now = user_home.store.scan()
    assert now.damaged == ()
    user_home.check_integrity()
    assert content(user_home) in states
    sweep.action(user_home)
    settle(user_home)
    user_home.check_integrity()
    exact(user_home)
    assert content(user_home) == sweep.after


@pytest.fixture
def template(fast: Path, package_factory: PackageFactory) -> HomeFixture:
    """A house with two experts, one of which shares a file with those that come."""
    user_home = HomeFixture(fast / "template").trust_keys("acme", "other")
    user_home.install(
        package_factory.package("acme/old"), package_factory.package("acme/kept", seed=5)
    )
    user_home.install(package_factory.package("acme/signed-anew"))
    return user_home


@dataclass(frozen=True)
class CrashScene:
    """A house, packages that are there for it, and a folder for its copies."""

    template: HomeFixture
    new: Path
    chain: tuple[Path, Path]
    together: Path
    signed: Path
    folder: Path

    def sweep(self, name: str) -> Sweep:
        """Do one of the actions once; it can go wrong at any step then."""
        actions: dict[str, Action] = {
            "install": lambda h: h.install(self.new, catalogue=h.catalogue, index=h.index),
            "install two": lambda h: h.install(*self.chain),
            "import two": self._import,
            "re-sign": lambda h: h.install(self.signed),
            "remove": remove_old,
        }
        return Sweep(self.template, actions[name], self.folder)

    def _import(self, user_home: HomeFixture) -> object:
        return install_set(self.together, user_home.context())


@pytest.fixture
def scene(template: HomeFixture, package_factory: PackageFactory, fast: Path) -> CrashScene:
    chain = (
        package_factory.package("acme/leaf", seed=2, composition={"requires": ["acme/root"]}),
        package_factory.package("acme/root", seed=3),
    )
    names = ["acme/leaf:1.0.0", "acme/root:1.0.0"]
    files = {
        name: read_packed_files(read_archive(path)) for name, path in zip(names, chain, strict=True)
    }
    return CrashScene(
        template=template,
        new=package_factory.package("acme/new", seed=1),
        chain=chain,
        together=write_frame(make_archive(list_set_members(files)), fast / "two.experts"),
        signed=package_factory.package("acme/signed-anew", key="other"),
        folder=fast / "copy",
    )


def remove_old(user_home: HomeFixture) -> None:
    store = user_home.store
    for expert in store.list_experts():
        if expert.ref == "acme/old@1.0.0":
            store.remove(expert)


def states_of(sweep: Sweep) -> list[dict[str, bytes]]:
    """Before, after, and between: what is required comes first."""
    root = {k: v for k, v in sweep.after.items() if not k.startswith("acme/leaf")}
    return [sweep.before, sweep.after, *([root] if root != sweep.after else [])]


NAMES = ["install", "install two", "import two", "re-sign", "remove"]


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_any_step_nothing_is_lost_and_the_next_command_completes_it(
    name: str, scene: CrashScene, lean: SpawnedProcess
) -> None:
    lean(killed_at_any_step, name, scene)


def killed_at_any_step(name: str, scene: CrashScene) -> None:
    sweep = scene.sweep(name)
    assert len(sweep.steps()) >= 8
    for step, _ in sweep.steps():
        user_home, ended = sweep.at(step, "kill")
        assert ended.killed, step
        assert_whole(user_home, sweep, states_of(sweep))


@pytest.mark.parametrize("name", ["install", "re-sign"])
def test_killed_in_the_middle_of_any_write_nothing_is_lost(
    name: str, scene: CrashScene, lean: SpawnedProcess
) -> None:
    lean(killed_in_any_write, name, scene)


def killed_in_any_write(name: str, scene: CrashScene) -> None:
    sweep = scene.sweep(name)
    writes = [n for n, step in sweep.steps() if step.kind == "write"]
    assert len(writes) >= 3
    for step in writes:
        user_home, ended = sweep.at(step, "torn")
        assert ended.killed, step
        assert_whole(user_home, sweep, states_of(sweep))


@pytest.mark.parametrize("name", ["install", "re-sign", "remove"])
def test_a_disk_that_fills_up_at_any_step_changes_nothing(
    name: str, scene: CrashScene, lean: SpawnedProcess
) -> None:
    lean(refused_at_any_step, name, scene, "full", DiskFullError)


@pytest.mark.parametrize("name", ["install", "re-sign", "remove"])
def test_an_input_output_error_at_any_step_changes_nothing(
    name: str, scene: CrashScene, lean: SpawnedProcess
) -> None:
    lean(refused_at_any_step, name, scene, "error", StoreError)


def refused_at_any_step(name: str, scene: CrashScene, fault: Fault, error: type[Exception]) -> None:
    sweep = scene.sweep(name)
    for step, _ in sweep.steps():
        user_home, ended = sweep.at(step, fault)
        assert ended.completed_or_raised(error), ended.trace
        assert_whole(user_home, sweep, states_of(sweep))


@pytest.mark.parametrize("name", ["install two", "import two"])
@pytest.mark.parametrize("fault", ["full", "error"])
def test_of_experts_that_are_given_together_all_are_installed_or_none(
    fault: Fault, name: str, scene: CrashScene, lean: SpawnedProcess
) -> None:
    lean(all_or_none_at_any_step, name, scene, fault)


def all_or_none_at_any_step(name: str, scene: CrashScene, fault: Fault) -> None:
    sweep = scene.sweep(name)
    for step, _ in sweep.steps():
        user_home, ended = sweep.at(step, fault)
        assert ended.completed_or_raised(DiskFullError, StoreError), ended.trace
        assert_whole(user_home, sweep, [sweep.before, sweep.after])


def test_the_steps_that_are_counted_are_all_there_are(scene: CrashScene) -> None:
    sweep = scene.sweep("install two")
    written: dict[str, int] = {}
    for _, step in sweep.steps():
        if step.kind == "write":
            written[Path(step.what).name] = written.get(Path(step.what).name, 0) + step.size
    blobs = HomeFixture(scene.folder).store.paths.blobs
    old = {path.name for path in scene.template.store.paths.blobs.iterdir()}
    new = {path.name: path.stat().st_size for path in blobs.iterdir() if path.name not in old}
    assert new
    assert {name: written[name] for name in new} == new


def test_a_ref_is_published_only_after_its_blobs_are_flushed(scene: CrashScene) -> None:
    sweep = scene.sweep("install")
    steps = [(s.kind, s.what) for _, s in sweep.steps()]
    blobs = str(HomeFixture(scene.folder).store.paths.blobs)
    ref = next(i for i, (kind, what) in enumerate(steps) if kind == "os.rename" and "ref" in what)
    flushed = [i for i, step in enumerate(steps) if step == ("fsync", blobs)]
    renamed = [i for i, (kind, _) in enumerate(steps[:ref]) if kind == "os.rename"]
    assert max(renamed) < max(i for i in flushed if i < ref)
    for i in renamed:
        assert ("fsync", steps[i][1]) in steps[:i], "a blob was renamed before it was flushed"
    parent = str(Store(scene.folder / "store").paths.refs / "local" / "acme" / "new")
    assert ("fsync", parent) in steps[ref:]


@pytest.mark.parametrize("fault", ["kill", "full", "error"])
@pytest.mark.parametrize("copied", [False, True], ids=["where it is", "copied"])
def test_adding_a_base_succeeds_wholly_or_not_at_all(
    copied: bool, fault: Fault, package_factory: PackageFactory, fast: Path, lean: SpawnedProcess
) -> None:
    lean(added_at_any_step, copied, fault, package_factory, HomeFixture(fast / "home"))


def added_at_any_step(
    copied: bool, fault: Fault, package_factory: PackageFactory, user_home: HomeFixture
) -> None:
    add = user_home.bases.add_copy if copied else user_home.bases.add
    whole = run_with_fault(lambda: add(package_factory.base_dir, name="one"))
    assert not whole.errors, whole.trace
    for step in range(1, len(whole.steps) + 1):
        shutil.rmtree(user_home.root, ignore_errors=True)
        ended = run_with_fault(
            lambda: add(package_factory.base_dir, name="one"), at=step, fault=fault
        )
        assert ended.completed_or_raised(StoreError, DiskFullError), ended.trace
        user_home.bases.check_integrity()
        assert [base.name for base in user_home.bases.list_bases()] in ([], ["one"])
        assert (
            add(package_factory.base_dir, name="one").identity.arch
            == package_factory.base.identity.arch
        )
        user_home.bases.check_integrity()
        assert {path.name for path in user_home.home.bases.iterdir()} == {"lock", "one"}


@pytest.mark.parametrize("fault", ["kill", "error"])
def test_removing_a_base_succeeds_wholly_or_not_at_all(
    fault: Fault, package_factory: PackageFactory, fast: Path
) -> None:
    user_home = HomeFixture(fast / "home")
    base = user_home.bases.add_copy(package_factory.base_dir)
    shutil.copytree(user_home.root, fast / "template")
    whole = run_with_fault(lambda: user_home.bases.remove(base))
    assert user_home.bases.list_bases() == []
    for step in range(1, len(whole.steps) + 1):
        shutil.rmtree(user_home.root)
        shutil.copytree(fast / "template", user_home.root)
        run_with_fault(lambda: user_home.bases.remove(base), at=step, fault=fault)
        user_home.bases.check_integrity()
        for left in user_home.bases.list_bases():
            user_home.bases.remove(left)
        assert user_home.bases.add_copy(package_factory.base_dir).identity == base.identity


def test_collecting_garbage_can_be_killed_at_any_step(
    template: HomeFixture, package_factory: PackageFactory, fast: Path
) -> None:
    killed = run_with_fault(
        lambda: template.install(package_factory.package("acme/new", seed=1)), at=25, fault="kill"
    )
    assert killed.killed
    assert list(template.store.paths.staging.iterdir())
    copy = Sweep.copied(template, fast / "copy")
    whole = run_with_fault(lambda: settle(copy))
    assert len(whole.steps) >= 4
    for step in range(1, len(whole.steps) + 1):
        Sweep.copied(template, fast / "copy")
        assert run_with_fault(lambda: settle(copy), at=step, fault="kill").killed
        assert content(copy) == content(template)
        settle(copy)
        exact(copy)
        copy.check_integrity()
