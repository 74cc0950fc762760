"""A quantised copy is found again as it was written, for the same base, or not at all."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.errors import BaseMismatchError, InvalidPackageError
from expertctl.install.doctor import Finding, examine_store
from expertctl.store import quantised_cache
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import (
    QuantisedCache,
    collect_garbage,
    find_garbage,
    open_quantised_cache,
)
from expertctl.store.quantised_file import QuantisedLayout, QuantisedPiece, iterate_pieces
from tests.factories import write_base
from tests.store.fault_injection import Fault, run_with_fault
from tests.store.fixtures import HomeFixture, user_home

__all__ = ["user_home"]

pytestmark = pytest.mark.all

DATA = bytes(range(256)) * 4
PIECE = 4 << 20
ROUTED = QuantisedLayout(rest_bytes=384, blocks=5, block_bytes=128)
"""A shape of as many bytes as `DATA`, most of them those of routed experts."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def bases(user_home: HomeFixture) -> BaseStore:
    return user_home.bases


@pytest.fixture
def base(bases: BaseStore, directory: Path) -> StoredBase:
    return bases.add(directory)


@pytest.fixture
def copies(bases: BaseStore, base: StoredBase) -> QuantisedCache:
    return QuantisedCache(bases, base)


def read(copies: QuantisedCache, scheme: str = "int8", size: int = len(DATA)) -> bytes | None:
    memory, shape = bytearray(size), QuantisedLayout(rest_bytes=size)
    return bytes(memory) if copies.read(scheme, shape, memoryview(memory)) else None


def write(copies: QuantisedCache, data: bytes = DATA, scheme: str = "int8") -> None:
    shape = QuantisedLayout(rest_bytes=len(data))
    copies.write(scheme, shape, memoryview(data), weights=copies.weights)


def stream(copies: QuantisedCache, data: bytes = DATA) -> None:
    """Write a copy of a base of routed experts, as one that is never in memory whole."""
    weights = copies.weights
    assert weights is not None
    pieces = iterate_pieces(memoryview(data), ROUTED)
    copies.stream("int8", ROUTED, pieces, weights=lambda: weights)


def read_routed(copies: QuantisedCache) -> bytes | None:
    memory = bytearray(len(DATA))
    return bytes(memory) if copies.read("int8", ROUTED, memoryview(memory)) else None


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 77])
def test_what_was_written_is_read_into_the_memory_that_it_is_for(
    copies: QuantisedCache, size: int
) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    assert read(copies, size=size) is None
    write(copies, data)
    counted: list[int] = []
    memory = memoryview(bytearray(size))
    assert copies.read("int8", QuantisedLayout(rest_bytes=size), memory, progress=counted.append)
    assert memory == data
    assert sum(counted) == size
    assert copies.take_notes() == ()
    assert copies.find_problems() == {}


def test_what_was_made_of_other_weights_is_refused_and_not_kept(copies: QuantisedCache) -> None:
    with pytest.raises(BaseMismatchError, match=r"tiny is not what was added: its weights are"):
        copies.write("int8", ROUTED, memoryview(DATA), weights=Digest.compute(b"another"))
    assert not copies.path("int8").exists()
    pieces = iterate_pieces(memoryview(DATA), ROUTED)
    with pytest.raises(BaseMismatchError, match=r"tiny is not what was added: its weights are"):
        copies.stream("int8", ROUTED, pieces, weights=lambda: Digest.compute(b"another"))
    assert list(copies.path("int8").parent.iterdir()) == []


def test_a_copy_belongs_to_its_scheme(copies: QuantisedCache) -> None:
    write(copies)
    assert read(copies, "int4") is None
    assert copies.take_notes() == ()
    copies.path("int8").rename(copies.path("int4"))
    assert read(copies, "int4") is None
    assert "damaged, or not of this base" in copies.take_notes()[0]


def test_a_copy_of_another_base_under_this_name_is_refused(
    bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    write(copies)
    another = Digest.compute(b"another")
    for identity in (
        replace(base.identity, arch=another),
        replace(base.identity, weights=another),
    ):
        assert read(QuantisedCache(bases, replace(base, identity=identity))) is None
    assert read(copies) == DATA


FILE_BYTES = len(DATA) + 32 + 24 + 32
"""One piece, its digest, the sizes, the seal."""


@settings(max_examples=80, deadline=None)
@given(position=st.integers(0, FILE_BYTES - 1), change=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_never_believed_and_told_once(
    position: int, change: int, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bases = BaseStore(tmp_path_factory.mktemp("home") / "bases")
    copies = QuantisedCache(bases, bases.add(directory))
    write(copies)
    path = copies.path("int8")
    content = bytearray(path.read_bytes())
    content[position] ^= change
    path.write_bytes(content)
    assert read(copies) is None
    assert len(copies.take_notes()) == 1
    assert copies.take_notes() == ()
    write(copies)
    assert read(copies) == DATA


@pytest.mark.parametrize("cut", [0, 1, 55, 56, 57, len(DATA), FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_size_is_never_believed(copies: QuantisedCache, cut: int) -> None:
    write(copies)
    path = copies.path("int8")
    path.write_bytes((path.read_bytes() + b"more")[:cut])
    assert read(copies) is None
    assert copies.take_notes()
    assert list(copies.find_problems()) == [path]
    assert read(copies, size=len(DATA) - 1) is None


def a_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


def a_folder(path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def writable_by_others(path: Path) -> None:
    path.chmod(0o622)


def of_somebody_else(path: Path) -> None:
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "change",
    [
        a_link,
        a_folder,
        a_pipe,
        writable_by_others,
        pytest.param(
            of_somebody_else, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
        ),
    ],
)
def test_a_file_that_may_not_be_ours_is_refused_and_replaced(
    copies: QuantisedCache, change: Callable[[Path], None]
) -> None:
    write(copies)
    path = copies.path("int8")
    change(path)
    assert read(copies) is None
    assert "is not used" in copies.take_notes()[0]
    write(copies, DATA[::-1])
    assert read(copies) == DATA[::-1]
    assert path.lstat().st_mode & 0o777 == 0o600
    assert not path.is_symlink()
    aside = path.with_name("aside")
    assert not aside.exists() or aside.read_bytes().startswith(DATA), (
        "what it pointed to is changed"
    )


def test_copies_lie_beside_the_record_and_go_with_it(
    bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    write(copies)
    folder = bases.folder / "tiny"
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"base.json", "quantised", "tokenizer-digest.json"}
    assert (folder / "quantised").stat().st_mode & 0o777 == 0o700
    assert copies.path("int8").stat().st_mode & 0o777 == 0o600
    bases.remove(base)
    assert not folder.exists()


def test_nothing_is_kept_of_a_base_that_was_removed_meanwhile(
    bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    bases.remove(base)
    write(copies)
    assert "removed or replaced meanwhile" in copies.take_notes()[0]
    assert [path.name for path in bases.folder.iterdir()] == ["lock"]


def test_a_new_version_takes_the_place_of_an_older_one(
    copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(copies)
    write(copies, scheme="int4")
    old = [copies.path(scheme) for scheme in ("int8", "int4")]
    monkeypatch.setattr(quantised_cache, "VERSION", quantised_cache.VERSION + 1)
    assert read(copies) is None
    assert copies.take_notes() == ()
    write(copies)
    assert not any(path.exists() for path in old)
    write(copies, scheme="int4")
    assert read(copies) == read(copies, "int4") == DATA


def test_a_copy_serves_who_has_all_of_it_in_memory_and_who_has_only_the_rest(
    copies: QuantisedCache,
) -> None:
    stream(copies)
    streamed = copies.path("int8").read_bytes()
    assert read_routed(copies) == DATA
    memory = memoryview(bytearray(ROUTED.rest_bytes))
    counted: list[int] = []
    assert copies.read("int8", ROUTED, memory, progress=counted.append)
    assert (bytes(memory), sum(counted)) == (DATA[: ROUTED.rest_bytes], ROUTED.rest_bytes)
    copies.write("int8", ROUTED, memoryview(DATA), weights=copies.weights)
    assert copies.path("int8").read_bytes() == streamed
    assert (copies.take_notes(), copies.find_problems()) == ((), {})


def test_a_copy_of_another_shape_is_not_used(copies: QuantisedCache) -> None:
    write(copies)
    assert read_routed(copies) is None
    assert "damaged, or not of this base" in copies.take_notes()[0]


def test_who_has_no_room_for_a_copy_takes_no_more_pieces_of_it(
    copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[QuantisedPiece] = []
    ended: list[int] = []
    write_some = os.write

    def write_until_full(handle: int, data: memoryview) -> int:
        if len(taken) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_some(handle, data)

    def pieces() -> Iterator[QuantisedPiece]:
        try:
            for piece in iterate_pieces(memoryview(DATA), ROUTED):
                taken.append(piece)
                yield piece
        finally:
            ended.append(len(taken))

    monkeypatch.setattr(os, "write", write_until_full)
    copies.stream("int8", ROUTED, pieces(), weights=lambda: Digest.compute(b"nobody asks"))
    assert "No space left" in copies.take_notes()[0]
    assert ended == [3]
    assert list(copies.path("int8").parent.iterdir()) == []


def test_a_disk_that_is_too_small_is_not_filled_first(copies: QuantisedCache) -> None:
    def pieces() -> Iterator[QuantisedPiece]:
        pytest.fail("somebody packs what there is no room for")
        yield from ()

    def weights() -> Digest:
        pytest.fail("what was packed is asked for")

    copies.stream("int8", ROUTED, pieces(), weights=weights, min_bytes=1 << 60)
    assert "cannot be written (it takes 1152921.5 TB, and" in copies.take_notes()[0]
    assert list(copies.path("int8").parent.iterdir()) == []


def test_that_a_large_copy_is_made_is_told_before_its_first_piece(
    bases: BaseStore, base: StoredBase
) -> None:
    told: list[str] = []
    copies = QuantisedCache(bases, base, notify=told.append)

    def weights() -> Digest:
        assert copies.weights is not None
        return copies.weights

    def pieces() -> Iterator[QuantisedPiece]:
        assert told == [
            f"copying {base.name} for this machine, once: at least 170.0 MB to "
            f"{copies.path('int8')}"
        ]
        yield from iterate_pieces(memoryview(DATA), ROUTED)

    copies.stream("int8", ROUTED, pieces(), weights=weights, min_bytes=170_000_000)
    assert copies.take_notes() == ()
    copies.write(
        "int8", QuantisedLayout(rest_bytes=len(DATA)), memoryview(DATA), weights=copies.weights
    )
    copies.stream("int4", ROUTED, iter(()), weights=weights, min_bytes=1 << 60)
    assert len(told) == 1


def test_an_error_of_who_gives_the_pieces_is_his(copies: QuantisedCache) -> None:
    def pieces() -> Iterator[QuantisedPiece]:
        yield from iterate_pieces(memoryview(DATA[: ROUTED.rest_bytes]), ROUTED)
        raise InvalidPackageError("model.safetensors", ["it is cut short"])

    with pytest.raises(InvalidPackageError, match="cut short"):
        copies.stream("int8", ROUTED, pieces(), weights=lambda: Digest.compute(b"nobody asks"))
    assert list(copies.path("int8").parent.iterdir()) == []


def test_a_copy_that_is_given_up_goes_and_who_has_it_open_reads_on(
    copies: QuantisedCache,
) -> None:
    stream(copies)
    copy = copies.open("int8", ROUTED)
    assert copy is not None
    with closing(copy):
        copies.discard_copy("int8", copy, why="it is damaged")
        path = copies.path("int8")
        told = f"{path} is not used any more (it is damaged): made again next time"
        assert copies.take_notes() == (told,)
        assert not path.exists()
        block = memoryview(bytearray(ROUTED.block_bytes))
        assert copy.read_piece(ROUTED.rest_pieces + 4, block)
        assert block == DATA[-ROUTED.block_bytes :]
        stream(copies, DATA[::-1])
        copies.discard_copy("int8", copy, why="it is damaged")
        assert read_routed(copies) == DATA[::-1], "another one is there now"


def test_a_copy_is_not_cut_where_it_lies_by_who_removes_or_replaces_it(
    user_home: HomeFixture, bases: BaseStore, copies: QuantisedCache
) -> None:
    """Whoever has it mapped would be killed."""
    stream(copies)
    copy = copies.open("int8", ROUTED)
    assert copy is not None
    with closing(copy):
        stream(copies, DATA[::-1])
        assert copy.is_whole()
        again = copies.path("int8").stat().st_ino
        copies.path("int8").rename(copies.path("int8").with_name("int8-0"))
        collect_garbage(user_home.store, bases)
        assert copy.is_whole()
        assert os.fstat(copy.handle).st_ino != again


def test_weights_that_nobody_hashed_have_no_copies(bases: BaseStore, base: StoredBase) -> None:
    unknown = replace(base, identity=replace(base.identity, weights=None))
    assert open_quantised_cache(bases, unknown) is None
    assert isinstance(open_quantised_cache(bases, base), QuantisedCache)


def test_many_write_and_read_at_once(copies: QuantisedCache) -> None:
    write(copies)
    seen: list[bytes | None] = []

    def work() -> None:
        for _ in range(10):
            write(copies)
            seen.append(read(copies))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [DATA] * 40
    assert copies.take_notes() == ()


@pytest.mark.parametrize("keep", [write, stream])
@pytest.mark.parametrize("fault", ["kill", "torn", "full", "error"])
def test_whatever_fails_at_any_step_leaves_a_whole_copy_or_none(
    fault: Fault,
    keep: Callable[..., None],
    bases: BaseStore,
    base: StoredBase,
    copies: QuantisedCache,
    tmp_path: Path,
) -> None:
    take = read if keep is write else read_routed
    keep(copies, DATA[::-1])
    template = tmp_path / "template"
    shutil.copytree(bases.folder, template)
    whole = run_with_fault(lambda: keep(copies))
    assert not whole.errors, whole.trace
    assert len(whole.steps) > 8
    for step in range(1, len(whole.steps) + 1):
        shutil.rmtree(bases.folder)
        shutil.copytree(template, bases.folder)
        ended = run_with_fault(lambda: keep(copies), at=step, fault=fault)
        assert not ended.errors, f"{whole.steps[step - 1]}: {ended.trace}"
        assert take(copies) in (DATA, DATA[::-1]), whole.steps[step - 1]
        assert copies.take_notes() == ()
        keep(copies)
        assert take(copies) == DATA
        bases.check_integrity()
        copies.check_integrity()
        left = {path.name for path in bases.folder.iterdir()}
        assert left == {"tiny", "lock"}, whole.steps[step - 1]


def test_what_cannot_be_kept_is_noted(
    bases: BaseStore, copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    write(copies)
    (note,) = copies.take_notes()
    assert note.startswith(f"{copies.path('int8')} cannot be written")
    assert "No space left" in note
    assert note.endswith("tried again next time")


def test_the_doctor_tells_of_copies_that_are_not_used(
    user_home: HomeFixture, copies: QuantisedCache
) -> None:
    write(copies)
    write(copies, scheme="int4")

    def findings() -> tuple[Finding, ...]:
        found = examine_store(
            user_home.store,
            bases=user_home.bases,
            trust=user_home.trust,
            catalogue=user_home.catalogue,
        )
        assert found.healthy, "a run makes it again"
        return tuple(f for f in found.findings if "quantised" in f.problem)

    assert findings() == ()
    path = copies.path("int8")
    path.write_bytes(b"?" + path.read_bytes()[1:])
    copies.path("int4").rename(path.with_name("int4-0"))
    assert [(Path(f.subject).name, f.problem.partition(": ")[2]) for f in findings()] == [
        ("int4-0", "another version of expertctl made it"),
        (path.name, "it is damaged"),
    ]


def test_garbage_of_bases_is_told_and_collected(
    user_home: HomeFixture, bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    write(copies)
    old = copies.path("int4").with_name("int4-0")
    old.write_bytes(b"12345")
    staged = bases.folder / ".new-0123456789abcdef"
    staged.mkdir()
    (staged / "int8-1").write_bytes(b"1234567")
    removed = bases.folder / "gone"
    (removed / "quantised").mkdir(parents=True)
    (removed / "quantised" / "int8-1").write_bytes(b"123")
    (bases.folder / "mine").mkdir()
    (bases.folder / "mine" / "notes").write_text("not ours")
    found = find_garbage(user_home.store, bases)
    assert (found.folders, found.copies, found.size) == ((staged, removed), (old,), 15)
    assert staged.exists()
    assert collect_garbage(user_home.store, bases) == found
    assert find_garbage(user_home.store, bases).size == 0
    assert read(copies) == DATA
    names = {path.name for path in bases.folder.iterdir()}
    assert names == {"tiny", "lock", "mine"}


@pytest.mark.parametrize("scheme", ["float32", "bfloat16", "int8", "int4"])
def test_copies_of_every_scheme_are_known_for_what_they_are(
    scheme: str, user_home: HomeFixture, bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    write(copies, scheme=scheme)
    old = copies.path(scheme).with_name(f"{scheme}-1")
    old.write_bytes(b"12345")
    assert copies.find_problems() == {old: "another version of expertctl made it"}
    assert collect_garbage(user_home.store, bases).copies == (old,)
    assert read(copies, scheme) == DATA
    bases.remove(base)
    assert not copies.path(scheme).exists()


def test_of_what_lies_among_the_copies_only_what_has_their_names_goes(
    user_home: HomeFixture,
    bases: BaseStore,
    base: StoredBase,
    copies: QuantisedCache,
    tmp_path: Path,
) -> None:
    write(copies)
    place, mine = copies.path("int8").parent, tmp_path / "mine"
    (place / "lost+found").mkdir()
    (place / "int4-0").mkdir()
    (place / "int4-0" / "part").write_bytes(b"123")
    mine.mkdir()
    (mine / "notes").write_text("not ours")
    (place / "int4-1").symlink_to(mine)
    odd = (place / "int4-0", place / "int4-1")
    assert find_garbage(user_home.store, bases).copies == odd
    assert collect_garbage(user_home.store, bases).copies == odd
    assert sorted(path.name for path in place.iterdir()) == [copies.path("int8").name, "lost+found"]
    assert (mine / "notes").read_text() == "not ours"
    assert read(copies) == DATA
    bases.remove(base)
    assert [path.name for path in place.iterdir()] == ["lost+found"]
    assert (find_garbage(user_home.store, bases).folders, bases.list_bases()) == ((), [])


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder of the user's own that has nothing to do with bases."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "letter").write_text("not ours")
    return folder


def test_a_collector_empties_nothing_to_which_a_link_leads(
    user_home: HomeFixture,
    bases: BaseStore,
    base: StoredBase,
    copies: QuantisedCache,
    documents: Path,
) -> None:
    """Whoever may put a link into such a folder must not choose what is removed."""
    write(copies)
    (documents / "copy").mkdir()
    places = (bases.folder, copies.path("int8").parent)
    links = [place / ".new-0123456789abcdef" for place in places]
    links += [bases.folder / "gone", bases.folder / ".new-mine"]
    for link in links:
        link.symlink_to(documents)
    only_copies = documents.parent / "only"
    (only_copies / "copy").mkdir(parents=True)
    (bases.folder / "left").symlink_to(only_copies)
    (bases.folder / ".new-fedcba9876543210").write_text("no folder")
    (bases.folder / ".new-notes").mkdir()
    assert find_garbage(user_home.store, bases).folders == ()
    assert collect_garbage(user_home.store, bases).folders == ()
    bases.add(base.path)  # whoever changes a base looks for what was left, too
    assert (documents / "letter").read_text() == "not ours"
    assert all(link.is_symlink() for link in links)
    assert (only_copies / "copy").is_dir()
    assert (bases.folder / ".new-notes").is_dir()
    assert read(copies) == DATA


def test_nothing_is_removed_where_others_may_write(
    user_home: HomeFixture, bases: BaseStore, base: StoredBase, copies: QuantisedCache
) -> None:
    """They could swap a folder for a link while it is emptied."""
    write(copies)
    folder = copies.path("int8").parent
    (folder / ".new-0123456789abcdef").mkdir()
    (folder / "int4-0").write_bytes(b"123")
    before = sorted(folder.iterdir())
    folder.chmod(0o777)
    assert read(copies) is None
    why = "others may write its folder, until you `chmod go-w` it"
    assert copies.find_problems() == dict.fromkeys((folder / "int4-0", copies.path("int8")), why)
    found = find_garbage(user_home.store, bases)
    assert (found.folders, found.copies) == ((), ())
    assert collect_garbage(user_home.store, bases).copies == ()
    bases.remove(base)
    assert sorted(folder.iterdir()) == before
    assert find_garbage(user_home.store, bases).folders == ()
    assert bases.list_bases() == []


def test_a_disk_may_be_mounted_where_the_bases_are(
    user_home: HomeFixture, bases: BaseStore, base: StoredBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a folder of root's own, empty or not to be read."""
    lost, others = bases.folder / "lost+found", bases.folder / "others"
    lost.mkdir()
    others.mkdir()
    list_folder = Path.iterdir

    def refuse(self: Path) -> Iterator[Path]:
        if self == others:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return list_folder(self)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert find_garbage(user_home.store, bases).folders == ()
    assert collect_garbage(user_home.store, bases).folders == ()
    assert lost.is_dir()
    assert others.is_dir()


def test_a_base_whose_folder_is_a_link_goes_and_what_else_lies_there_stays(
    user_home: HomeFixture, bases: BaseStore, directory: Path, documents: Path
) -> None:
    base = bases.add_copy(directory, name="moved")
    home, copies = bases.folder / "moved", QuantisedCache(bases, base)
    write(copies)
    for path in list(home.iterdir()):
        path.rename(documents / path.name)
    home.rmdir()
    home.symlink_to(documents)
    bases.remove(bases.find("moved"))
    assert [path.name for path in documents.iterdir()] == ["letter"]
    assert not home.is_symlink()
    assert find_garbage(user_home.store, bases).folders == ()


@pytest.fixture
def elsewhere(copies: QuantisedCache, tmp_path: Path) -> Path:
    """A folder of the user's own, with something else in it, to which the copies are linked."""
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    (folder / "letter").write_text("not ours")
    (folder / "photos").mkdir()
    copies.path("int8").parent.symlink_to(folder)
    return folder


def test_copies_are_kept_where_their_folder_leads(
    user_home: HomeFixture,
    bases: BaseStore,
    base: StoredBase,
    copies: QuantisedCache,
    elsewhere: Path,
) -> None:
    write(copies)
    assert (elsewhere / copies.path("int8").name).read_bytes().startswith(DATA)
    assert read(copies) == DATA
    assert (copies.take_notes(), copies.find_problems()) == ((), {})
    (elsewhere / "int4-0").write_bytes(b"123")
    staged = elsewhere / ".new-0123456789abcdef"
    staged.mkdir()
    found = collect_garbage(user_home.store, bases)
    place = bases.copies_folder(base)
    assert (found.folders, found.copies) == ((place / staged.name,), (place / "int4-0",))
    assert read(copies) == DATA
    bases.remove(base)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["letter", "photos"]
    assert [path.name for path in bases.folder.iterdir()] == ["lock"]


def test_a_copy_is_written_on_the_disk_that_keeps_it(
    copies: QuantisedCache, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two disks: nothing is renamed from elsewhere."""
    replace_file = Path.replace

    def within_one(self: Path, target: Path) -> Path:
        if self.resolve().is_relative_to(elsewhere) != target.resolve().is_relative_to(elsewhere):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", within_one)
    write(copies)
    assert copies.take_notes() == ()
    assert read(copies) == DATA


def a_file(folder: Path) -> str:
    folder.write_text("mine")
    return "it is no folder"


def a_link_to_nothing(folder: Path) -> str:
    folder.symlink_to("/unplugged/disk")
    return "it leads to /unplugged/disk, which is not there"


def a_folder_for_all(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "others may write it"


@pytest.mark.parametrize("place", [a_file, a_link_to_nothing, a_folder_for_all])
def test_a_place_that_cannot_keep_copies_is_told_once(
    copies: QuantisedCache, place: Callable[[Path], str]
) -> None:
    folder = copies.path("int8").parent
    why = place(folder)
    assert read(copies) is None
    write(copies)
    told = f"{copies.path('int8')} cannot be written ({folder}: {why}): tried again next time"
    assert copies.take_notes() == (told,)


def test_what_others_remove_meanwhile_stops_no_collector(
    user_home: HomeFixture, copies: QuantisedCache, tmp_path: Path
) -> None:
    write(copies)
    place, failed = copies.path("int8").parent, []

    def work(number: int) -> None:
        try:
            for turn in range(25):
                folder = tmp_path / f"int8-0{number}{turn}"
                folder.mkdir()
                (folder / "part").write_bytes(b"123")
                folder.rename(place / folder.name)  # whole: another one may remove it at once
                find_garbage(user_home.store, user_home.bases)
                collect_garbage(user_home.store, user_home.bases)
        except Exception as error:  # noqa: BLE001  # of a thread, for the test to see
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in place.iterdir()] == [copies.path("int8").name]
    assert read(copies) == DATA


def test_garbage_without_any_base_is_none(user_home: HomeFixture) -> None:
    assert find_garbage(user_home.store, user_home.bases).size == 0
    assert collect_garbage(user_home.store, user_home.bases).folders == ()
