"""Adapters of a hub: which files of a repository make one, and how its package is called.

A package says in ``training.source`` of its manifest where it was taken from: the hub, the
repository, the commit, and the digest of each file at it. Its name is ``hf/ORG-NAME``, in the
letters that a name may have. A commit has no order, so versions are counted here: the first commit
that is installed is 0.1.0, the next one 0.2.0.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, hash_file
from expertctl.errors import (
    ConflictError,
    DigestError,
    ExpertError,
    IncompatibleError,
    to_single_line,
)
from expertctl.install.hub_files import HubFile, HubListing, HubName
from expertctl.package.directory import CONFIG_PATH, PICKLES, WEIGHTS_PATH
from expertctl.package.layout import is_document
from expertctl.reference import MAX_LENGTH, PackageName, Version
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import HUB_NAMESPACE

MLX_WEIGHTS = "adapters.safetensors"
_COMPANIONS = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What is compared with the base's own, where an adapter brings it."""
_MAX_COMPANION = 64 << 20
_MAX_SLUG = 64
_FOREIGN = re.compile(r"[^a-z0-9]+")
SOURCE_KEY = "source"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A repository at a commit, as ``training.source`` of a manifest describes it."""

    hub: str
    repository: str
    revision: str

    def to_json(self, digests: Mapping[str, Digest]) -> JsonObject:
        """Return the entry of the manifest; ``digests`` are those of the repository's files."""
        return {
            "hub": self.hub,
            "repository": self.repository,
            "revision": self.revision,
            "files": {name: str(digest) for name, digest in sorted(digests.items())},
        }


def choose_adapter_files(listing: HubListing, *, allows_pickle: bool) -> tuple[HubFile, ...]:
    """Return the files of a repository that make an adapter: the configuration first.

    Raises:
        IncompatibleError: when it has no adapter at its top, or only a pickled one.
    """
    config, weights = listing.find(CONFIG_PATH), _find_weights(listing, allows_pickle=allows_pickle)
    if config is None or weights is None:
        raise _build_no_adapter_error(listing)
    others = [
        file
        for file in listing.files
        if "/" not in file.name
        and file.size <= _MAX_COMPANION
        and (file.name in _COMPANIONS or file.name == MANIFEST_PATH or is_document(file.name))
    ]
    return (config, *others, weights)


def _find_weights(listing: HubListing, *, allows_pickle: bool) -> HubFile | None:
    names = [WEIGHTS_PATH, MLX_WEIGHTS, *(PICKLES if allows_pickle else ())]
    return next((file for name in names if (file := listing.find(name)) is not None), None)


def _build_no_adapter_error(listing: HubListing) -> ExpertError:
    """Explain what a repository has in place of an adapter, and what to do."""
    name, names = listing.name, [file.name for file in listing.files]
    if listing.find(CONFIG_PATH) is not None:
        pickled = [pickle for pickle in PICKLES if pickle in names]
        if pickled:
            return IncompatibleError(
                f"{name} has its weights only in {pickled[0]}, a pickle, which can run code",
                hint=f"`expertctl build {name} --allow-pickle-in-sandbox` reads its tensors in a "
                "restricted process",
            )
        return IncompatibleError(
            f"{name} has {CONFIG_PATH}, and no weights in safetensors",
            hint=f"ask its publisher for {WEIGHTS_PATH}",
        )
    below = sorted(n for n in names if n.endswith(f"/{CONFIG_PATH}"))
    if below:
        shown = to_single_line(", ".join(path.rpartition("/")[0] for path in below[:5]))
        return IncompatibleError(
            f"{name} has no adapter at its top, but in folders: {shown}",
            hint="download the folder that you want, then `expertctl build DIR`",
        )
    return IncompatibleError(
        f"{name} has no {CONFIG_PATH}, so it is no adapter that PEFT or mlx-lm saved",
        hint=f"if it is a base model: `expertctl pull {name}`",
    )


def is_adapter_folder(folder: Path, *, allows_pickle: bool) -> bool:
    """Tell whether a folder of the cache has the files that an adapter needs."""
    weights = (WEIGHTS_PATH, MLX_WEIGHTS, *(PICKLES if allows_pickle else ()))
    return (folder / CONFIG_PATH).is_file() and any((folder / n).is_file() for n in weights)


def hash_adapter_files(folder: Path, expected: Mapping[str, Digest]) -> dict[str, Digest]:
    """Return the digests of configuration, weights and manifest, compared with those of the hub.

    Raises:
        DigestError: when a file in the cache is not the one that the hub listed.
    """
    names = (CONFIG_PATH, WEIGHTS_PATH, MLX_WEIGHTS, *PICKLES, MANIFEST_PATH)
    digests = {name: hash_file(folder / name)[1] for name in names if (folder / name).is_file()}
    for name, digest in digests.items():
        if expected.get(name, digest) != digest:
            raise DigestError(
                f"{name} in the cache of the hub is not the file that the hub listed",
                hint=f"remove {(folder / name).resolve()}, then repeat the command",
            )
    return digests


def build_package_name(name: HubName) -> PackageName:
    """Return ``hf/ORG-NAME``: the repository in lower case, with hyphens for other characters."""
    slug = _FOREIGN.sub("-", name.repository.lower()).strip("-")[:_MAX_SLUG].strip("-")
    return PackageName(HUB_NAMESPACE, slug or "adapter")


def find_installed_copy(
    store: Store, package: PackageName, source: AdapterSource
) -> StoredExpert | None:
    """Return the installed package of a commit; None if there is none.

    Raises:
        ConflictError: when another repository's package is installed under the name.
    """
    for expert in _list_copies(store, package):
        found = read_source(store, expert)
        if found is None or (found.repository, found.hub) != (source.repository, source.hub):
            origin = f"from {found.repository} of {found.hub}" if found else "from a file"
            raise ConflictError(
                f"{expert.ref} is installed {origin}",
                hint=f"`expertctl build {source.repository} --name local/NAME` builds a package of "
                f"another name, or first `expertctl remove {expert.ref}`",
            )
        if found.revision == source.revision:
            return expert
    return None


def choose_next_version(store: Store, package: PackageName) -> Version:
    """Return 0.1.0, or the minor version that follows the newest one of a package."""
    known = [expert.version for expert in _list_copies(store, package)]
    if not known:
        return Version.parse("0.1.0")
    newest = max(known)
    return Version.parse(f"{newest.major}.{newest.minor + 1}.0")


def _list_copies(store: Store, package: PackageName) -> list[StoredExpert]:
    return [expert for expert in store.list_experts() if expert.package == package]


def read_source(store: Store, expert: StoredExpert) -> AdapterSource | None:
    """Return what the manifest of an installed expert says about its origin on a hub."""
    with suppress(ExpertError, OSError):
        manifest = next(file for file in expert.files if file.path == MANIFEST_PATH)
        data = store.blob_path(manifest.digest).read_bytes()
        document = load_object(data, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)
        training = document.get("training")
        source = training.get(SOURCE_KEY) if isinstance(training, dict) else None
        if isinstance(source, dict):
            found = [source.get(key) for key in ("hub", "repository", "revision")]
            hub, repository, revision = (to_single_line(str(text)[:MAX_LENGTH]) for text in found)
            return AdapterSource(hub, repository, revision)
    return None
