"""What a package is built from: an adapter, which may be one of a hub, and its base.

``build ORG/NAME`` downloads an adapter. ``install hf:ORG/NAME`` also converts it into a package and
signs that with the user's key ``hf``, which is made when it is first needed and is trusted for
``hf/*`` and, as each own key, for ``local/*``. The signature says that this machine converted these
files, not who made them.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.cli.engine import find_base_or_folder
from expertctl.cli.hub import download_files, find_hub_name, list_hub_files, mention_folder
from expertctl.cli.output import note, print_message, warn
from expertctl.cli.progress import show_progress
from expertctl.errors import (
    ConflictError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    OfflineError,
    UnreachableError,
    UsageError,
)
from expertctl.install.hub import HubCache, find_expected_digests
from expertctl.install.hub_adapter import (
    AdapterSource,
    build_package_name,
    choose_adapter_files,
    choose_next_version,
    find_installed_copy,
    hash_adapter_files,
    is_adapter_folder,
)
from expertctl.install.hub_files import HUB_PREFIX, HubName, parse_hub_name
from expertctl.package.adapter import is_hub_name
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.draft import ManifestOverrides, find_base_label, read_draft
from expertctl.package.foreign_adapter import open_adapter, write_adapter
from expertctl.package.gguf_adapter import find_label, is_adapter, read_gguf_adapter
from expertctl.package.gguf_file import is_gguf_file, read_gguf_header
from expertctl.package.model_config import read_model_config
from expertctl.settings import Settings, load_settings
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.trust_store import HUB_NAMESPACE, PublisherIdentity, TrustStore

_KEY_NAME = "hf"
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class FetchedAdapter:
    """An adapter in the cache of the hub: its folder, and where it was taken from."""

    name: HubName
    folder: Path
    source: AdapterSource

    @property
    def label(self) -> str:
        """The repository and the first digits of the commit."""
        return f"{self.name.repository} at {self.source.revision[:_SHOWN_DIGITS]}"


def locate_adapter(
    text: str,
    overrides: ManifestOverrides,
    settings: Settings,
    *,
    allows_pickle: bool,
    as_json: bool,
) -> tuple[Path, ManifestOverrides]:
    """Return the directory of an adapter, downloaded if the text names one of a hub.

    The manifest of a downloaded one says where it was taken from.

    Raises:
        ExpertError: as `fetch_adapter`.
    """
    directory = Path(text)
    is_path = text.startswith((".", "/", "~", "\\")) or text.endswith(("/", "\\"))
    name = None if is_path else find_hub_name(text)
    if name is None:
        return directory, overrides
    found = fetch_adapter(text, name, settings, allows_pickle=allows_pickle, as_json=as_json)
    return found.folder, _complete(found, overrides)


def _complete(found: FetchedAdapter, overrides: ManifestOverrides) -> ManifestOverrides:
    digests = hash_adapter_files(found.folder, find_expected_digests(found.folder))
    stated = read_draft(found.folder).get("name")
    name = overrides.name or (None if stated else str(build_package_name(found.name)))
    return replace(overrides, name=name, source=found.source.to_json(digests))


def fetch_adapter(
    text: str, name: HubName, settings: Settings, *, allows_pickle: bool, as_json: bool
) -> FetchedAdapter:
    """Return an adapter from the cache of the hub, after a download of what it lacks.

    Raises:
        IncompatibleError: when the repository has no adapter.
        ExpertError: as `HubConnection` and `HubCache`.
    """
    cache = HubCache.from_environment(os.environ, is_offline=settings.offline)
    cached = _find_cached(cache, name, allows_pickle=allows_pickle)
    if cached is not None and (cache.connection.is_offline or name.is_pinned):
        note(f"{name} is in the cache of the hub; nothing is downloaded")
        return _describe(cache, name, cached)
    try:
        listing = list_hub_files(cache.connection, name)
    except ExpertError as error:
        if cached is not None and isinstance(error, UnreachableError):
            warn([f"{error.message}; what the cache has of {name} is used"])
            return _describe(cache, name, cached)
        if isinstance(error, NotFoundError | OfflineError):
            raise mention_folder(error, text) from error
        raise
    files = choose_adapter_files(listing, allows_pickle=allows_pickle)
    fetched = download_files(cache, listing, files, copy_to=None, as_json=as_json)
    return _describe(cache, name, fetched.path)


def _find_cached(cache: HubCache, name: HubName, *, allows_pickle: bool) -> Path | None:
    folder = cache.find_cached(name)
    is_whole = folder is not None and is_adapter_folder(folder, allows_pickle=allows_pickle)
    return folder if is_whole else None


def _describe(cache: HubCache, name: HubName, folder: Path) -> FetchedAdapter:
    source = AdapterSource(cache.connection.host, name.repository, folder.name)
    return FetchedAdapter(name, folder, source)


def split_hub_names(texts: Sequence[str]) -> tuple[list[HubName], list[str]]:
    """Separate ``hf:ORG/NAME`` from other arguments of ``install``.

    Raises:
        UsageError: for ``hf:`` before something else.
    """
    names = [text for text in texts if text.startswith(HUB_PREFIX)]
    others = [text for text in texts if not text.startswith(HUB_PREFIX)]
    return [name for text in names if (name := parse_hub_name(text)) is not None], others


@contextmanager
def convert_adapters(
    names: Sequence[HubName], settings: Settings, *, as_json: bool
) -> Iterator[list[Path]]:
    """Yield package files made from adapters of a hub; those that are installed are left out.

    The files are removed at the end of the ``with`` block.

    Raises:
        ConflictError: when another repository's package is installed under the name.
        ExpertError: as `fetch_adapter`, and as building a package.
    """
    if not names:
        yield []
        return
    _require_different(names)
    with tempfile.TemporaryDirectory(prefix="expertctl-") as folder:
        made = (_convert(name, settings, Path(folder), as_json=as_json) for name in names)
        yield [path for path in made if path is not None]


def _require_different(names: Sequence[HubName]) -> None:
    packages = [build_package_name(name) for name in names]
    for number, package in enumerate(packages):
        if package in packages[:number]:
            first = names[packages.index(package)]
            raise ConflictError(
                f"{first} and {names[number]} would both be {package}",
                hint=f"install one of them; `expertctl build {names[number]} --name local/NAME` "
                "builds a package of another name",
            )


def _convert(name: HubName, settings: Settings, folder: Path, *, as_json: bool) -> Path | None:
    """Return a signed package of one adapter; None if its commit is installed."""
    text, store, package = (
        f"{HUB_PREFIX}{name}",
        Store(settings.home.store),
        build_package_name(name),
    )
    found = fetch_adapter(text, name, settings, allows_pickle=False, as_json=as_json)
    installed = find_installed_copy(store, package, found.source)
    if installed is not None:
        note(f"{installed.ref} is installed from {found.label} already")
        return None
    version = choose_next_version(store, package)
    overrides = ManifestOverrides(str(package), str(version))
    target = folder / f"{package.name}-{version}.expert"
    _build(found, _complete(found, overrides), target, settings, as_json=as_json)
    note(
        f"{package}@{version} was converted from {found.label}, and is signed with your key "
        f"{_KEY_NAME}: nobody else vouches for it"
    )
    return target


def _build(
    found: FetchedAdapter,
    overrides: ManifestOverrides,
    target: Path,
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    from expertctl.package.build import build_package, plan_build

    with open_adapter_source(found.folder, None, as_json=as_json) as source:
        size = measure_weights(source.converted or found.folder)
        try:
            with show_progress("checking", size, as_json=as_json) as report:
                plan = plan_build(
                    found.folder,
                    overrides,
                    base=source.base,
                    converted=source.converted,
                    progress=report,
                )
        except InvalidPackageError as error:
            raise _name_repository(error, found) from error
        with show_progress("packing", 2 * plan.size, as_json=as_json) as report:
            built = build_package(plan, target, key=_read_key(settings), progress=report)
    warn(built.warnings)
    for line in (*source.notes, *built.notes):
        note(line)


def _name_repository(error: InvalidPackageError, found: FetchedAdapter) -> InvalidPackageError:
    """Name the repository in place of a folder of the cache, and a command with more options."""
    what = error.what.replace(str(found.folder), str(found.name))
    way = f"`expertctl build {found.name} --base NAME` makes a package with a base that you name"
    return InvalidPackageError(what, error.problems, hint=error.hint or way)


def _read_key(settings: Settings) -> PrivateKey:
    """Return the key that signs converted packages; it is made when there is none."""
    home = settings.home
    identity = PublisherIdentity(KeyRing(home.keys), TrustStore(home.trust))
    known = next((key for key in identity.list_keys() if key.name == _KEY_NAME), None)
    if known is None:
        identity.create_key(_KEY_NAME, namespaces=[HUB_NAMESPACE])
        note(f"made your key {_KEY_NAME}, which signs what you install from a hub")
    elif HUB_NAMESPACE not in known.namespaces and not known.revoked:
        identity.grant_namespaces(_KEY_NAME, [HUB_NAMESPACE])
        note(f"your key {_KEY_NAME} is now trusted for {HUB_NAMESPACE}/* here, too")
    return identity.read_signing_key(_KEY_NAME)


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An adapter that a package can be built from, and its base, if that is known."""

    directory: Path
    converted: Path | None
    """A folder of files that take the place of those in the directory."""
    notes: tuple[str, ...]
    base: BaseFacts | None


@contextmanager
def open_adapter_source(
    path: Path, base: str | None, *, reads_pickle: bool = False, as_json: bool
) -> Iterator[OpenAdapter]:
    """Open an adapter: a directory, or a LoRA in a GGUF file, which becomes a directory meanwhile.

    ``base`` is what ``--base`` names.

    Raises:
        ExpertError: as `open_adapter` and `find_base_facts`, and for a GGUF file as
            `read_gguf_adapter`.
    """
    if is_gguf_file(path):
        with tempfile.TemporaryDirectory(prefix="expertctl-") as folder:
            yield _convert_gguf(path, base, Path(folder))
        return
    with open_adapter(path, reads_pickle=reads_pickle) as (converted, notes):
        facts = find_base_facts(path, base, converted, as_json=as_json)
        yield OpenAdapter(path, converted, notes, facts)


def _convert_gguf(path: Path, base: str | None, folder: Path) -> OpenAdapter:
    header = read_gguf_header(path)
    if not is_adapter(header):
        raise UsageError(
            f"{path} is a model, not an adapter", hint=f"`expertctl base add {path}` registers it"
        )
    bases, label = BaseStore(load_settings().home.bases), find_label(header)
    known = bases.find(base) if base is not None else label and bases.find_by_label(label)
    if not known:
        named = f"its base {label} is" if label else "its base is not named, or"
        raise NotFoundError(
            f"{path}: {named} not known here, and a GGUF adapter is read for its base",
            hint="name it with `--base NAME`, after `expertctl base add DIR` or "
            "`expertctl base add FILE.gguf`",
        )
    found = read_gguf_adapter(header, read_model_config(known.path))
    directory = folder / path.stem
    directory.mkdir()
    write_adapter(found, directory)
    return OpenAdapter(directory, None, (found.note,), _build_base_facts(known))


def find_base_facts(
    directory: Path, base: str | None, converted: Path | None, *, as_json: bool
) -> BaseFacts | None:
    """Find the base: the one of ``--base``, else the one that the adapter names, if known."""
    label = find_base_label(directory, converted)
    bases = BaseStore(load_settings().home.bases)
    if base is not None:
        named = find_base_or_folder(bases, base)
        if isinstance(named, Path):
            return _read_base(named, label, as_json=as_json)
        return _build_base_facts(named)
    if label is None:
        return None
    found = bases.find_by_label(label)
    if found is None:
        if names := ", ".join(known.name for known in bases.list_bases()):
            print_message(
                f"the adapter names the base {label[:200]!r}; known here, for --base: {names}"
            )
        return None
    if found.name != label:
        print_message(f"the adapter's base {label!r} was matched to {found.name}")
    return _build_base_facts(found)


def _build_base_facts(base: StoredBase) -> BaseFacts:
    return BaseFacts(base.identity, base.shapes, base.foreign, base.path)


def _read_base(directory: Path, label: str | None, *, as_json: bool) -> BaseFacts:
    if directory.is_file():
        hint = f"`expertctl base add {directory}`, then build again"
        raise NotFoundError(f"the GGUF file {directory} is not registered", hint=hint)
    name = label if label and is_hub_name(label) else None
    with show_progress("hashing base", measure_weights(directory), as_json=as_json) as report:
        return read_base(directory, name=name, progress=report)


def measure_weights(directory: Path) -> int | None:
    """Return the bytes of the weights in a directory."""
    if not directory.is_dir():
        return None
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
