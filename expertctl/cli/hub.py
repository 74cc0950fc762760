"""Base models by name: their download for ``pull`` and ``base add``, and its offer to ``--base``.

For ``pull``, only what begins as a path is one; elsewhere a path that exists is never taken for a
name. What is downloaded stays in the cache of
``huggingface_hub``, where the base is registered in place.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expertctl.cli.output import note, warn
from expertctl.cli.progress import show_download, show_progress
from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    ExpertError,
    NotFoundError,
    OfflineError,
    UnreachableError,
    UsageError,
    to_single_line,
)
from expertctl.install.hub import HubCache, find_expected_digests, list_expected_digests
from expertctl.install.hub_connection import HubConnection
from expertctl.install.hub_files import (
    HUB_PREFIX,
    HubFile,
    HubListing,
    HubName,
    choose_files,
    parse_hub_name,
)
from expertctl.settings import Settings, format_size
from expertctl.store.base_record import StoredBase, check_base_name
from expertctl.store.bases import BaseStore, count_bytes_to_read

_SHOWN_DIGITS = 12
_PATH_START = re.compile(r"[./~\\]|[A-Za-z]:[/\\]")


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model in the cache of the hub: its folder, or its GGUF file."""

    name: HubName
    path: Path
    commit: str
    digests: Mapping[str, Digest]
    downloaded: int
    """The bytes that had to be downloaded."""


def find_hub_name(text: str, revision: str | None = None) -> HubName | None:
    """Return the model that an argument names; None for a path.

    Raises:
        UsageError: for an impossible name or revision, or two revisions.
    """
    if not text.startswith(HUB_PREFIX) and os.path.lexists(text):
        return None
    return _parse_name(text, revision)


def find_name_to_pull(text: str, revision: str | None = None) -> HubName | None:
    """Return the model that an argument of ``pull`` names; None for what begins as a path does.

    Raises:
        UsageError: when the text does neither, and as `find_hub_name`.
    """
    if _PATH_START.match(text):
        return find_hub_name(text, revision)
    name = _parse_name(text, revision)
    if name is None:
        raise UsageError(
            f"{to_single_line(text[:100])!r} does not name a model of a hub",
            hint="a name is ORG/NAME, such as Qwen/Qwen3-0.6B, hf:NAME for a model without ORG, or "
            "of those that `expertctl base search` lists; `expertctl base add DIR` adds a folder",
        )
    return name


def _parse_name(text: str, revision: str | None) -> HubName | None:
    name = parse_hub_name(text)
    if name is None or revision is None:
        return name
    if name.revision is not None:
        raise UsageError(f"{name} and --revision name two revisions", hint="leave out one of them")
    return parse_hub_name(f"{HUB_PREFIX}{name.repository}@{revision}")


def fetch_model(
    text: str,
    name: HubName,
    settings: Settings,
    bases: BaseStore,
    *,
    pattern: str | None,
    called: str | None,
    copies: bool,
    as_json: bool,
) -> FetchedModel:
    """Return a model from the cache of the hub, after a download of what it lacks.

    ``text`` is what the user typed, ``called`` the name that the base is to get, and
    ``copies`` whether it will be copied.

    Raises:
        ConflictError: when another base is registered under that name.
        UsageError: when no base can have that name.
        ExpertError: as `HubConnection` and `HubCache`.
    """
    check_base_name(called or name.repository)
    cache = HubCache.from_environment(os.environ, is_offline=settings.offline)
    is_settled = cache.connection.is_offline or name.is_pinned
    complete = cache.find_complete(name, pattern) if is_settled else None
    if complete is not None and (cache.connection.is_offline or not cache.list_unknown(complete)):
        return _describe_cached(cache, name, complete)
    try:
        listing = list_hub_files(cache.connection, name)
    except ExpertError as error:
        if complete is None and isinstance(error, UnreachableError):
            complete = cache.find_complete(name, pattern)
        if complete is not None:
            warn([f"{error.message}; what the cache has of {name} is used"])
            return _describe_cached(cache, name, complete)
        if isinstance(error, NotFoundError | OfflineError):
            raise mention_folder(error, text) from error
        raise
    files = choose_files(listing, pattern)
    _require_free_name(listing, files, bases, called)
    copy_to = bases.folder if copies else None
    return download_files(cache, listing, files, copy_to=copy_to, as_json=as_json)


def list_hub_files(connection: HubConnection, name: HubName) -> HubListing:
    """Ask a hub for the files of a repository; say so if that is done without the user's token."""
    if not connection.is_offline and connection.withholds_token():
        warn([f"HF_ENDPOINT has no TLS, so {connection.host} is asked without your token"])
    return connection.list_files(name)


def _describe_cached(cache: HubCache, name: HubName, path: Path) -> FetchedModel:
    folder = path if path.is_dir() else path.parent
    while folder.parent.name != "snapshots":
        folder = folder.parent
    note(f"{name} is in the cache of the hub; nothing is downloaded")
    unknown = cache.list_unknown(path)
    if unknown:
        files = ", ".join(unknown)
        warn([f"the cache may lack files of {name}, which only the hub knows: {files}"])
    return FetchedModel(name, path, folder.name, find_expected_digests(path), 0)


def download_files(
    cache: HubCache,
    listing: HubListing,
    files: tuple[HubFile, ...],
    *,
    copy_to: Path | None,
    as_json: bool,
) -> FetchedModel:
    """Download what the cache lacks of chosen files of a repository."""
    commit = listing.commit
    missing = cache.count_missing(listing, files)
    cache.require_space(listing, files, copy_to=copy_to)
    label = f"{listing.name.repository} at {commit[:_SHOWN_DIGITS]}"
    if missing:
        total = sum(file.size for file in files)
        part = "" if missing == total else f" of {format_size(total)}"
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        note(f"downloading {label}: {format_size(missing)}{part}, {count}, to {cache.folder}")
    else:
        note(f"{label} is in the cache of the hub; nothing is downloaded")
    with show_download(missing, as_json=as_json) as report:
        folder = cache.download(listing, files, progress=report, notify=note)
    gguf = [file.name for file in files if file.name.endswith(".gguf")]
    path = folder / gguf[0] if gguf else folder
    return FetchedModel(listing.name, path, commit, list_expected_digests(files), missing)


def _require_free_name(
    listing: HubListing, files: tuple[HubFile, ...], bases: BaseStore, called: str | None
) -> None:
    """Refuse, before a download, a name that another base has."""
    label = called or listing.name.repository
    known = next((base for base in bases.list_bases() if base.name == label), None)
    if known is None:
        return
    hint = f"give this one a `--name`, or first `expertctl base remove {label}`"
    repository, revision = listing.name.repository, known.identity.revision
    if revision == listing.commit:
        stated, digests = list_expected_digests(files), known.digests
        weights = [name for name in stated if name.endswith((".safetensors", ".gguf"))]
        if all(digests.get(name) == stated[name] for name in weights):
            return
        raise ConflictError(
            f"another base is called {label}: {known.source}, with other weights of {repository}",
            hint=hint,
        )
    here = str(known.path) if revision is None else f"revision {revision[:_SHOWN_DIGITS]}"
    raise ConflictError(
        f"another base is called {label}: {here}, and {listing.name.wanted_revision} of "
        f"{repository} is {listing.commit[:_SHOWN_DIGITS]} now",
        hint=hint,
    )


def mention_folder(error: ExpertError, text: str) -> ExpertError:
    """Return the error for a name that may have been meant as a folder, which is missing, too."""
    if text.startswith(HUB_PREFIX) or "/" not in text or "@" in text:
        return error
    return type(error)(f"{error.message}; there is no folder {text} either", hint=error.hint)


def find_known_model(text: str, bases: BaseStore) -> StoredBase | None:
    """Return the registered base that a short name or ``hf:ORG/NAME`` stands for."""
    name = find_hub_name(text)
    if name is None:
        return None
    known = (base for base in bases.list_bases() if base.name == name.repository)
    found = next(known, None)
    if found is None or name.revision in {None, found.identity.revision}:
        return found
    return None


def offer_model(
    text: str, error: NotFoundError, settings: Settings, bases: BaseStore, *, as_json: bool
) -> FetchedModel:
    """Return the model that ``--base`` names, if the cache has it or the user wants a download.

    Raises:
        NotFoundError: ``error``, where the text is no name, and without a terminal or consent.
    """
    name = find_hub_name(text)
    if name is None:
        raise error
    cache = HubCache.from_environment(os.environ, is_offline=settings.offline)
    complete = cache.find_complete(name, None)
    if complete is not None:
        return _describe_cached(cache, name, complete)
    near = error.hint if error.hint.startswith("did you mean") else ""
    hint = f"{near}; or download it: `expertctl pull {text}`" if near else ""
    refusal = NotFoundError(
        error.message, hint=hint or f"`expertctl pull {text}` downloads it, if a hub has it"
    )
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if as_json or not terminal or cache.connection.is_offline:
        raise refusal
    try:
        listing = list_hub_files(cache.connection, name)
    except NotFoundError as unknown:
        message = f"{error.message}, and {unknown.message}"
        raise NotFoundError(message, hint=near or unknown.hint) from unknown
    try:
        files = choose_files(listing)
        _require_free_name(listing, files, bases, None)
    except (UsageError, ConflictError) as refused:
        option = "--file PATTERN" if isinstance(refused, UsageError) else "--name NAME"
        hint = f"`expertctl pull {text}` with {option}, then name that base"
        raise type(refused)(refused.message, hint=hint) from refused
    missing = cache.count_missing(listing, files)
    question = f"Download {name} ({format_size(missing)}) from {cache.connection.host}?"
    if not _ask(question):
        raise refusal
    return download_files(cache, listing, files, copy_to=None, as_json=as_json)


def _ask(question: str) -> bool:
    """Ask at the terminal; only ``y`` and ``yes`` mean yes. Nothing is written to stdout."""
    sys.stderr.write(f"{to_single_line(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in {"y", "yes"}


def add_model(model: FetchedModel, bases: BaseStore, *, as_json: bool) -> StoredBase:
    """Register a fetched model under the name of its repository."""
    size = count_bytes_to_read(model.path)
    with show_progress("hashing base", size, as_json=as_json) as report:
        return bases.add(
            model.path,
            name=model.name.repository,
            revision=model.commit,
            expected=model.digests,
            progress=report,
        )
