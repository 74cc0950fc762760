"""`BaseStore`: the base models that this machine knows, one folder each.

A base stays in its own directory: ``bases/<name>/base.json`` holds its path, its digests, the
shapes of its linear layers, and size, time, inode and digest of every file. The files of a copy lie
beside that record, as do those that follow from a GGUF file, which stays in place. Every change of
a record updates the time stamp of ``bases/``, so a reader that caches records checks only that.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.errors import ConflictError, NotFoundError, UsageError
from expertctl.files import make_folders, remove_tree, sync_folder, write_atomic
from expertctl.package.adapter import find_full_precision_label
from expertctl.package.base_model import (
    differs_in_tokenizer_form_only,
    open_hashing_threads,
    read_base,
    read_base_headers,
)
from expertctl.package.gguf_file import is_gguf_file
from expertctl.schema.strict_json import encode_canonical
from expertctl.store.base_folder import (
    QUALITY,
    QUANTISED,
    STAGED_PREFIX,
    USAGE_PROFILE,
    list_all_staged,
    list_orphaned_folders,
    make_copies_folder,
    remove_base_folder,
    remove_entry,
    replace_copy,
    save_canonical_tokenizer,
    with_canonical_tokenizer,
)
from expertctl.store.base_record import (
    COPY_FOLDER,
    DERIVED_PREFIX,
    NO_DIGESTS,
    BaseFile,
    StoredBase,
    build_unknown_base_hint,
    check_digests,
    check_directory,
    check_unchanged,
    copy_files,
    encode_base_record,
    find_changed_files,
    hash_base_files,
    infer_name,
    list_base_files,
    match_label,
    read_base_record,
    refresh_files,
    stat_base_files,
)
from expertctl.store.disk import disk_errors
from expertctl.store.gguf_folder import check_same_file, write_gguf_files
from expertctl.store.locks import LOCK_SECONDS, claim_folder, exclusive_lock, is_claimed

_RECORD = "base.json"


def count_bytes_to_read(directory: Path, *, copies: bool = False) -> int:
    """Return the bytes read to add a base: files, then tensors; files once more for a copy."""
    files = directory.iterdir() if directory.is_dir() else [directory]
    return sum(path.stat().st_size for path in files if path.is_file()) * (3 if copies else 2)


@dataclass(frozen=True, slots=True)
class BaseStore:
    """The known bases; nothing is created until one is added.

    Methods that write raise `StoreError` when the folder cannot be written, or other processes
    change it for too long.
    """

    folder: Path

    def list_bases(self) -> list[StoredBase]:
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
        known = self.list_bases()
        for base in known:
            identity = base.identity
            if wanted in (base.name, str(identity.weights), str(identity.arch)):
                return base
        if wanted.strip() and (there := self.find_by_path(wanted)) is not None:
            return there
        raise NotFoundError(
            f"no base is called {wanted[:200]!r}", hint=build_unknown_base_hint(wanted, known)
        )

    def find_by_path(self, place: str | Path) -> StoredBase | None:
        """Return the base of a folder or of a GGUF file; None for any other path."""
        with suppress(OSError, ValueError, RuntimeError):  # a text that is no path
            found = Path(place).expanduser().resolve(strict=True)
            return next((b for b in self.list_bases() if b.source.resolve() == found), None)
        return None

    def find_by_label(self, label: str) -> StoredBase | None:
        """Return the base that an adapter's label refers to, by its full name or its last part.

        ``Qwen/Qwen3-0.6B`` and ``/models/Qwen3-0.6B`` both refer to the only base that is called
        ``Qwen3-0.6B``. A label is compared, never opened. A label that ends in ``-bnb-4bit`` refers
        to the 16-bit base where that quantised model itself was not added.
        """
        known = self.list_bases()
        full = find_full_precision_label(label)
        return match_label(known, label) or (None if full is None else match_label(known, full))

    def add(
        self,
        directory: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        expected: Mapping[str, Digest] = NO_DIGESTS,
        progress: Progress = ignore_progress,
    ) -> StoredBase:
        """Read all files of a base and register it in place; repeating this is harmless.

        ``directory`` may be a GGUF file: the folder of the base then has what follows from it.

        A base whose tokenizer was saved again in another form replaces the one of its name, and
        keeps the digest by which packages and plans name its tokenizer. ``expected`` are the
        digests of files by name, where somebody stated them.

        Raises:
            DigestError: when a file has another digest than expected.
            NotFoundError: when the directory or one of its files is missing.
            IncompatibleError: when no engine supports such a model.
            InvalidPackageError: when a file of it is malformed.
            ConflictError: when another base has that name.
        """
        if is_gguf_file(directory):
            with self._stage_gguf(
                directory, name, revision, expected, progress, copied=False
            ) as base:
                return self._commit_derived(base)
        _check_base(directory)
        name, revision = infer_name(directory, name, revision)
        with self._exclusive():
            pass  # a folder that cannot be written is reported before anything is hashed
        with disk_errors(self.folder):
            base = _read_base(directory, name=name, revision=revision, progress=progress)
        check_digests(base.files, expected, what=base.name)
        with self._exclusive():
            return self._add_record(base)

    def add_copy(
        self,
        directory: Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        expected: Mapping[str, Digest] = NO_DIGESTS,
        progress: Progress = ignore_progress,
    ) -> StoredBase:
        """Copy a base and register the copy, see `add`; an existing sound copy is kept."""
        if is_gguf_file(directory):
            with self._stage_gguf(
                directory, name, revision, expected, progress, copied=True
            ) as base:
                return self._commit_copy(base.path, base)
        _check_base(directory)
        name, revision = infer_name(directory, name, revision)
        with disk_errors(self.folder), ExitStack() as stack:
            with self._exclusive():
                own = stack.enter_context(claim_folder(self.folder, prefix=STAGED_PREFIX))
            files = own / COPY_FOLDER
            copy_files(directory, files, progress)
            base = _read_base(files, name=name, revision=revision, progress=progress)
            check_digests(base.files, expected, what=base.name)
            with self._exclusive():
                return self._commit_copy(files, base)

    @contextmanager
    def _stage_gguf(
        self,
        file: Path,
        name: str | None,
        revision: str | None,
        expected: Mapping[str, Digest],
        progress: Progress,
        *,
        copied: bool,
    ) -> Iterator[StoredBase]:
        """Write the files of a GGUF base to a staged folder, and hold the lock to commit it."""
        if file.resolve().is_relative_to(self.folder.resolve()):
            raise UsageError(
                f"{file} is the copy of a base that is registered",
                hint="add the file that it was copied from; `expertctl base list` shows the bases",
            )
        with disk_errors(self.folder), ExitStack() as stack:
            name, revision = infer_name(file, name, revision)
            with self._exclusive():
                own = stack.enter_context(claim_folder(self.folder, prefix=STAGED_PREFIX))
            files = own / COPY_FOLDER
            state = write_gguf_files(file, files, copied=copied, progress=progress)
            base = _read_base(files, name=name, revision=revision, progress=progress)
            check_same_file(base.files, file, state)
            check_digests(base.files, expected, what=base.name)
            with self._exclusive():
                yield base

    def _commit_derived(self, base: StoredBase) -> StoredBase:
        """Move the files of a GGUF base beside its record; the record is the commit."""
        base = self._with_recorded_identity(base)
        home = self._base_folder(base.name)
        own = encode_canonical([[file.path, str(file.digest)] for file in base.files])
        place = home / f"{DERIVED_PREFIX}{Digest.compute(own).hex[:16]}"
        make_folders(home, mode=0o700)
        kept, problems = refresh_files(place, base.files)
        if problems:
            remove_tree(place)
            base.path.rename(place)
            sync_folder(home)
            kept = base.files
        base = replace(base, path=place, files=kept)
        self._write_record(base)
        self._remove_other_folders(base)
        return base

    def _remove_other_folders(self, base: StoredBase) -> None:
        """Remove what former records of a base named."""
        home = self._base_folder(base.name)
        for folder in (home / COPY_FOLDER, *home.glob(f"{DERIVED_PREFIX}*")):
            if folder != base.path:
                remove_tree(folder)

    def remove(self, base: StoredBase) -> None:
        """Unregister a base; its files stay, unless they are our own copy."""
        with self._exclusive():
            home = self._base_folder(base.name)
            self._touch_folder()  # before, too: the process may be killed after the change
            (home / _RECORD).unlink(missing_ok=True)
            sync_folder(home)
            remove_base_folder(home)
            self._touch_folder()

    def check(self, base: StoredBase) -> None:
        """Require that the files are those added, by size, time and inode, else by content.

        Raises:
            BaseMismatchError: naming every file that differs.
        """
        files, problems = refresh_files(base.path, base.files)
        check_unchanged(base.name, problems)
        if files != base.files and os.access(self.folder, os.W_OK):
            self._update_files(base, files)

    def rehash(self, base: StoredBase) -> None:
        """Require that the files are those added, reading every byte.

        Raises:
            BaseMismatchError: naming every file that differs.
        """
        check_unchanged(base.name, find_changed_files(base.path, base.files))

    @contextmanager
    def stage_copy(self, base: StoredBase) -> Iterator[Path]:
        """Create a folder beside the copies of a base, on their disk, to write a copy in.

        At the end the folder is removed with its content; at the start, leftovers of killed
        processes.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
        """
        with ExitStack() as stack:
            with self._exclusive():
                self._check_recorded(base)
                folder = self.copies_folder(base)
                with disk_errors(folder):
                    make_copies_folder(folder)
                    own = stack.enter_context(claim_folder(folder, prefix=STAGED_PREFIX))
            yield own

    def copies_folder(self, base: StoredBase) -> Path:
        """Return the path of the quantised copies of a base; see `QuantisedCache`."""
        return self._base_folder(base.name) / QUANTISED

    def quality_path(self, base: StoredBase, scheme: str) -> Path:
        """Return the path of what a base loses in a scheme; see `QuantisedCache`."""
        return self._base_folder(base.name) / QUALITY.format(scheme)

    def place_copy(self, base: StoredBase, staged: Path, place: Path) -> None:
        """Move a flushed file to its path among the copies and remove older ones of its scheme.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
        """
        with self._exclusive():
            self._check_recorded(base)
            replace_copy(staged, place)

    def usage_profile_path(self, base: StoredBase) -> Path:
        """Return the path of the usage profile of a base; see `UsageProfileFile`."""
        return self._base_folder(base.name) / USAGE_PROFILE

    @contextmanager
    def lock_base(self, base: StoredBase, *, seconds: float) -> Iterator[None]:
        """Lock the files kept with a base against changes; wait at most ``seconds`` for the lock.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
        """
        with self._exclusive(seconds):
            self._check_recorded(base)
            yield

    def discard_copies(self, copies: Iterable[Path], *, seconds: float = LOCK_SECONDS) -> None:
        """Remove files or folders among the copies of bases.

        Waits at most ``seconds`` for other processes that change bases.
        """
        with self._exclusive(seconds):
            for path in copies:
                assert path.parent.parent.parent == self.folder, path
                remove_entry(path)

    def collect_garbage(self) -> tuple[Path, ...]:
        """Remove what `find_garbage` returns."""
        if not self.folder.is_dir():
            return ()
        with disk_errors(self.folder), exclusive_lock(self.folder / "lock"):
            found = self.find_garbage()
            for folder in found:
                remove_base_folder(folder)
            return found

    def find_garbage(self) -> tuple[Path, ...]:
        """Return the folders left by killed processes and removed bases; changes nothing."""
        staged = [path for path in list_all_staged(self.folder) if not is_claimed(path)]
        return tuple(sorted([*staged, *list_orphaned_folders(self.folder)]))

    def check_integrity(self) -> None:
        """Raise unless every record can be read and every base is unchanged."""
        for base in self.list_bases():
            assert self._base_folder(base.name).is_dir(), base.name
            self.check(base)

    def _add_record(self, base: StoredBase) -> StoredBase:
        """Write the record of a base that stays in place, then remove a copy of it."""
        base = self._with_recorded_identity(base)
        home = self._base_folder(base.name)
        copy = home / COPY_FOLDER
        if copy.is_dir() and copy.samefile(base.path):
            base = replace(base, path=copy, copied=True)
        make_folders(home, mode=0o700)
        self._write_record(base)
        self._remove_other_folders(base)
        return base

    def _update_files(self, base: StoredBase, files: tuple[BaseFile, ...]) -> None:
        """Store new times and inodes of the same content, so that it is hashed only once."""
        path = self._base_folder(base.name) / _RECORD
        with self._exclusive():
            if path.exists() and read_base_record(path) == base:
                self._write_record(replace(base, files=files))

    def _commit_copy(self, files: Path, base: StoredBase) -> StoredBase:
        """Move a copy to its final path; the record, written last, is the commit."""
        base = self._with_recorded_identity(base)
        home = self._base_folder(base.name)
        placed = replace(base, path=home / COPY_FOLDER, copied=True)
        sound = self._find_sound_copy(home)
        if sound is None:
            make_folders(home, mode=0o700)
            remove_tree(placed.path)
            files.rename(placed.path)
            sync_folder(home)
        else:
            placed = replace(sound, added_ns=base.added_ns)
        self._write_record(placed)
        self._remove_other_folders(placed)
        return placed

    def _write_record(self, base: StoredBase) -> None:
        self._touch_folder()
        save_canonical_tokenizer(base, self._base_folder(base.name))
        write_atomic(self._base_folder(base.name) / _RECORD, encode_base_record(base))
        self._touch_folder()

    def _touch_folder(self) -> None:
        """Update the time of the folder, so that processes that cache records read them again."""
        now = time.time_ns()
        os.utime(self.folder, ns=(now, now))

    def _find_sound_copy(self, home: Path) -> StoredBase | None:
        """Return the existing copy if it is unchanged; another process may be reading it."""
        path = home / _RECORD
        base = _read_record(path) if path.exists() else None
        if base is None or not base.copied:
            return None
        return None if refresh_files(base.path, base.files)[1] else base

    def _with_recorded_identity(self, base: StoredBase) -> StoredBase:
        """Return a base under the identity that is recorded for its name, if there is a record.

        Raises:
            ConflictError: when the record is that of another base.
        """
        path = self._base_folder(base.name) / _RECORD
        if not path.exists():
            return base
        known, found = _read_record(path).identity, base.identity
        if not differs_in_tokenizer_form_only(known, found):
            raise ConflictError(
                f"another base is called {base.name}",
                hint=f"give this one a `--name`, or first `expertctl base remove {base.name}`",
            )
        return replace(base, identity=replace(found, tokenizer=known.tokenizer))

    @contextmanager
    def _exclusive(self, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        with disk_errors(self.folder):
            make_folders(self.folder, mode=0o700)
            with exclusive_lock(self.folder / "lock", seconds=seconds):
                for left in list_all_staged(self.folder):
                    if not is_claimed(left):
                        remove_tree(left)
                yield

    def _check_recorded(self, base: StoredBase) -> None:
        """Require that a base is still the one recorded under its name."""
        record = self._base_folder(base.name) / _RECORD
        if not record.exists() or read_base_record(record).identity != base.identity:
            raise ConflictError(f"the base {base.name} was removed or replaced meanwhile")

    def _base_folder(self, name: str) -> Path:
        return self.folder / quote(name, safe="")


def _read_record(path: Path) -> StoredBase:
    return with_canonical_tokenizer(read_base_record(path), path.parent)


def _check_base(directory: Path) -> None:
    """Refuse a base that cannot run, before any file is hashed or copied."""
    check_directory(directory)
    read_base_headers(directory)


def _read_base(
    directory: Path, *, name: str, revision: str | None, progress: Progress
) -> StoredBase:
    """Read a base; its files are hashed at the same time, in other threads."""
    names = list_base_files(directory)
    stamps = stat_base_files(directory, names)
    with open_hashing_threads() as (pool, go_on):

        def count(size: int) -> None:
            go_on(size)
            progress(size)

        hashing = pool.submit(hash_base_files, directory, names, stamps=stamps, progress=count)
        facts = read_base(directory, name=name, revision=revision, progress=progress)
        files = hashing.result()
    check_unchanged(name, refresh_files(directory, files)[1])
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
