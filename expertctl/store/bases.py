"""`BaseStore`: the base models that this machine knows, one folder each.

A base stays where it is: ``bases/<name>/base.json`` holds its path, its digests, the shapes of its
linear layers, and size, time, inode and digest of every file. A copy's files lie beside that
record, wherever the folder is moved. Every change of a record gives ``bases/`` a new time, so a
reader that caches records need check only that.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from expertctl.digest import Progress, no_progress
from expertctl.durable import make_folders, remove_tree, sync_folder, write_atomic
from expertctl.errors import (
    ConflictError,
    NotFoundError,
)
from expertctl.package.base_model import is_saved_again, read_base, read_headers
from expertctl.package.config_cleaning import full_precision_label
from expertctl.store.base_files import (
    BaseFile,
    copy_files,
    current_files,
    file_names,
    fingerprint,
    refuse_changes,
    rehashed,
)
from expertctl.store.base_place import check_directory, named
from expertctl.store.base_record import COPY, StoredBase, encode_base, read_base_record
from expertctl.store.base_tokenizer import keep_canonical_tokenizer, with_canonical_tokenizer
from expertctl.store.copies_folder import (
    HABITS,
    QUANTISED,
    STAGED,
    left_below,
    make_copies_folder,
    put_in_place,
    remove_entry,
    remove_home,
    staged_below,
)
from expertctl.store.disk import disk_errors
from expertctl.store.lock import LOCK_SECONDS, claim, exclusive, is_held
from expertctl.store.store import near_names

_RECORD = "base.json"
_MOST_NAMED = 8
"""How many known bases an error names."""


@dataclass(frozen=True, slots=True)
class BaseStore:
    """The known bases; nothing is created until one is added."""

    folder: Path

    def bases(self) -> list[StoredBase]:
        """Return the known bases, sorted by name.

        Raises:
            StoreError: when the record of one is damaged.
        """
        if not self.folder.is_dir():
            return []
        known = []
        for path in self.folder.glob(f"[!.]*/{_RECORD}"):
            with suppress(FileNotFoundError):  # removed meanwhile
                known.append(_read_record(path))
        return sorted(known, key=lambda base: base.name)

    def find(self, wanted: str) -> StoredBase:
        """Return a base by its name, its folder, or the digest of its architecture or weights.

        Raises:
            NotFoundError: when there is none; the hint names what is near.
        """
        known = self.bases()
        for base in known:
            identity = base.identity
            if wanted in (base.name, str(identity.weights), str(identity.arch)):
                return base
        if wanted.strip() and (there := self.at(wanted)) is not None:
            return there
        raise NotFoundError(f"no base is called {wanted[:200]!r}", hint=_known_bases(wanted, known))

    def at(self, place: str | Path) -> StoredBase | None:
        """Return the base whose files lie in a folder; None for any other place."""
        with suppress(OSError, ValueError, RuntimeError):  # a text that names no place
            folder = Path(place).expanduser().resolve(strict=True)
            return next((b for b in self.bases() if b.path.resolve() == folder), None)
        return None

    def meant_by(self, label: str) -> StoredBase | None:
        """Return the base that an adapter's label means: by its name, else by the last part.

        ``Qwen/Qwen3-0.6B`` and ``/models/Qwen3-0.6B`` both mean the only base that is called
        ``Qwen3-0.6B``. A label is compared, never opened. One that ends in ``-bnb-4bit`` means the
        16-bit base where that copy itself was not added.
        """
        known = self.bases()
        full = full_precision_label(label)
        return _meant(known, label) or (None if full is None else _meant(known, full))

    def add(
        self,
        directory: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        progress: Progress = no_progress,
    ) -> StoredBase:
        """Read a base whole and remember it where it is; repeating this is harmless.

        A base whose tokenizer was saved again in another form takes the place of the one known
        under its name, and keeps the digest by which packages and plans name its tokenizer.

        Raises:
            NotFoundError: when the directory or one of its files is missing.
            IncompatibleError: when no engine supports such a model.
            InvalidPackageError: when a file of it is malformed.
            ConflictError: when another base has that name.
        """
        _check_base(directory)
        name, revision = named(directory, name, revision)
        with self._changing():
            pass  # a folder that cannot be written is reported before anything is hashed
        with disk_errors(self.folder):
            base = _read_whole(directory, name=name, revision=revision, progress=progress)
        with self._changing():
            return self._record(base)

    def add_copy(
        self,
        directory: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        progress: Progress = no_progress,
    ) -> StoredBase:
        """Copy a base and remember the copy, see `add`; a sound copy that exists is kept."""
        _check_base(directory)
        name, revision = named(directory, name, revision)
        with disk_errors(self.folder), ExitStack() as stack:
            with self._changing():
                own = stack.enter_context(claim(self.folder, prefix=STAGED))
            files = own / COPY
            copy_files(directory, files, progress)
            base = _read_whole(files, name=name, revision=revision, progress=progress)
            with self._changing():
                return self._place(files, base)

    def remove(self, base: StoredBase) -> None:
        """Forget a base; its files stay, unless they are a copy of ours.

        Raises:
            StoreError: when the store cannot be written.
        """
        with self._changing():
            home = self._home(base.name)
            self._say_so()  # before, too: the process may be killed after the change
            (home / _RECORD).unlink(missing_ok=True)
            sync_folder(home)
            remove_home(home)
            self._say_so()

    def check(self, base: StoredBase) -> None:
        """Demand that the files are those added, by size, time and inode; in doubt by content.

        Raises:
            BaseMismatchError: naming every file that differs.
        """
        files, problems = current_files(base.path, base.files)
        refuse_changes(base.name, problems)
        if files != base.files and os.access(self.folder, os.W_OK):
            self._refresh(base, files)

    def rehash(self, base: StoredBase, *, progress: Progress = no_progress) -> None:
        """Demand that the files are those added, reading every byte.

        Raises:
            BaseMismatchError: naming every file that differs.
        """
        refuse_changes(base.name, rehashed(base.path, base.files, progress=progress))

    @contextmanager
    def staging(self, base: StoredBase) -> Iterator[Path]:
        """Lend a folder beside the copies of a base, on their disk, to write a copy in.

        At the end it is removed with what is in it; at the start, what killed processes left.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
            StoreError: when its copies cannot be written.
        """
        with ExitStack() as stack:
            with self._changing():
                self._demand(base)
                folder = self.copies_of(base)
                with disk_errors(folder):
                    make_copies_folder(folder)
                    own = stack.enter_context(claim(folder, prefix=STAGED))
            yield own

    def copies_of(self, base: StoredBase) -> Path:
        """Where the quantised copies of a base are; see `QuantisedCopies`."""
        return self._home(base.name) / QUANTISED

    def keep(self, base: StoredBase, staged: Path, place: Path) -> None:
        """Move a flushed file to its place among the copies; older ones of its scheme go.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
            StoreError: when the store cannot be written.
        """
        with self._changing():
            self._demand(base)
            put_in_place(staged, place)

    def habits_of(self, base: StoredBase) -> Path:
        """Where the habits of a base's routed experts are kept; see `HabitsFile`."""
        return self._home(base.name) / HABITS

    @contextmanager
    def holding(self, base: StoredBase, *, seconds: float) -> Iterator[None]:
        """Lock what is kept with a base against changes; wait at most ``seconds`` for the lock.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
            StoreError: when the store cannot be written, or others change it for too long.
        """
        with self._changing(seconds):
            self._demand(base)
            yield

    def discard(self, copies: Iterable[Path], *, seconds: float = LOCK_SECONDS) -> None:
        """Remove files, or folders, that lie among the copies of bases.

        It waits at most ``seconds`` for other processes that change bases.

        Raises:
            StoreError: when the store cannot be written.
        """
        with self._changing(seconds):
            for path in copies:
                assert path.parent.parent.parent == self.folder, path
                remove_entry(path)

    def collect(self) -> tuple[Path, ...]:
        """Remove what `garbage` returns.

        Raises:
            StoreError: when the store cannot be written.
        """
        if not self.folder.is_dir():
            return ()
        with disk_errors(self.folder), exclusive(self.folder / "lock"):
            found = self.garbage()
            for folder in found:
                remove_home(folder)
            return found

    def garbage(self) -> tuple[Path, ...]:
        """Return the folders that killed processes left; changes nothing."""
        staged = [path for path in staged_below(self.folder) if not is_held(path)]
        return tuple(sorted([*staged, *left_below(self.folder)]))

    def check_integrity(self) -> None:
        """Raise unless every record can be read and every base is what was added."""
        for base in self.bases():
            assert self._home(base.name).is_dir(), base.name
            self.check(base)

    def _record(self, base: StoredBase) -> StoredBase:
        """Remember a base where it is, then remove a copy of it."""
        base = self._as_recorded(base)
        home = self._home(base.name)
        copy = home / COPY
        if copy.is_dir() and copy.samefile(base.path):
            base = replace(base, path=copy, copied=True)
        make_folders(home, mode=0o700)
        self._write(base)
        if not base.copied:
            remove_tree(copy)
        return base

    def _refresh(self, base: StoredBase, files: tuple[BaseFile, ...]) -> None:
        """Remember new times and inodes of the same content, so that it is hashed once only."""
        path = self._home(base.name) / _RECORD
        with self._changing():
            if path.exists() and read_base_record(path) == base:
                self._write(replace(base, files=files))

    def _place(self, files: Path, base: StoredBase) -> StoredBase:
        """Move a copy to its place; the record, written last, is the commit."""
        base = self._as_recorded(base)
        home = self._home(base.name)
        placed = replace(base, path=home / COPY, copied=True)
        sound = self._sound_copy(home)
        if sound is None:
            make_folders(home, mode=0o700)
            remove_tree(placed.path)
            files.rename(placed.path)
            sync_folder(home)
        else:
            placed = replace(sound, added_ns=base.added_ns)
        self._write(placed)
        return placed

    def _write(self, base: StoredBase) -> None:
        self._say_so()
        keep_canonical_tokenizer(base, self._home(base.name))
        write_atomic(self._home(base.name) / _RECORD, encode_base(base))
        self._say_so()

    def _say_so(self) -> None:
        """Change the time of the folder, so that processes that cache records read them again."""
        now = time.time_ns()
        os.utime(self.folder, ns=(now, now))

    def _sound_copy(self, home: Path) -> StoredBase | None:
        """Return the existing copy if it is sound; another process may be reading it."""
        path = home / _RECORD
        base = _read_record(path) if path.exists() else None
        if base is None or not base.copied:
            return None
        return None if current_files(base.path, base.files)[1] else base

    def _as_recorded(self, base: StoredBase) -> StoredBase:
        """Return a base under the identity that is recorded for it, if there is a record.

        Raises:
            ConflictError: when the record is that of another base.
        """
        path = self._home(base.name) / _RECORD
        if not path.exists():
            return base
        known, found = _read_record(path).identity, base.identity
        if not is_saved_again(known, found):
            raise ConflictError(
                f"another base is called {base.name}",
                hint=f"give this one a `--name`, or first `expertctl base remove {base.name}`",
            )
        return replace(base, identity=replace(found, tokenizer=known.tokenizer))

    @contextmanager
    def _changing(self, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        with disk_errors(self.folder):
            make_folders(self.folder, mode=0o700)
            with exclusive(self.folder / "lock", seconds=seconds):
                for left in staged_below(self.folder):
                    if not is_held(left):
                        remove_tree(left)
                yield

    def _demand(self, base: StoredBase) -> None:
        """Demand that a base is still the one recorded under its name."""
        record = self._home(base.name) / _RECORD
        if not record.exists() or read_base_record(record).identity != base.identity:
            raise ConflictError(f"the base {base.name} was removed or replaced meanwhile")

    def _home(self, name: str) -> Path:
        return self.folder / quote(name, safe="")


def _read_record(path: Path) -> StoredBase:
    return with_canonical_tokenizer(read_base_record(path), path.parent)


def _check_base(directory: Path) -> None:
    """Refuse a base that cannot run, before anything of it is hashed or copied."""
    check_directory(directory)
    read_headers(directory)


def _read_whole(
    directory: Path, *, name: str, revision: str | None, progress: Progress
) -> StoredBase:
    names = file_names(directory)
    files = fingerprint(directory, names, progress=progress)
    facts = read_base(directory, name=name, revision=revision, progress=progress)
    refuse_changes(name, current_files(directory, files)[1])
    place = directory.absolute()
    return StoredBase(
        name=name,
        path=place,
        identity=facts.identity,
        files=files,
        shapes=facts.shapes,
        copied=False,
        added_ns=time.time_ns(),
        foreign=facts.foreign,
    )


def _meant(known: Sequence[StoredBase], label: str) -> StoredBase | None:
    exact = [base for base in known if base.name == label]
    alike = [base for base in known if _last_part(base.name) == _last_part(label)]
    found = exact or alike
    return found[0] if len(found) == 1 else None


def _known_bases(wanted: str, known: Sequence[StoredBase]) -> str:
    """Return the hint for a base that is not known: the names like it, and all that are known."""
    names = [base.name for base in known]
    near = near_names(wanted, names)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    if not names:
        return "none is known yet: `expertctl base add DIR`"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{meant}known: {', '.join(names[:_MOST_NAMED])}{more}; `expertctl base add DIR` adds one"
    )


def _last_part(label: str) -> str:
    return label.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
