"""Models of a hub: their names, and which files of a repository make a base.

A name is ``ORG/NAME``, with ``hf:`` before it where a folder could be meant, or a short name of
`SHORT_NAMES`; ``@`` and a branch, a tag or a commit may follow. What a hub lists is not trusted:
the number, names and sizes of files are checked here before any of them is used.

A base is its configuration, its tokenizer, and weights in safetensors; or one GGUF file, where the
user names it. Pickles and Python files are never among the files to download.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from expertctl.digest import Digest
from expertctl.errors import (
    ExpertError,
    IncompatibleError,
    NotFoundError,
    RegistryError,
    UsageError,
    to_single_line,
)
from expertctl.package.adapter import is_hub_name
from expertctl.package.base_model import TOKENIZER_FILE
from expertctl.package.base_tensors import INDEX_FILE, WEIGHTS_FILE
from expertctl.package.config_document import CONFIG_FILE
from expertctl.store.base_record import OPTIONAL_FILES

HUB_PREFIX = "hf:"
"""Before a name, it says that no folder is meant."""
_DEFAULT_REVISION = "main"
ENDPOINT_HINT = "check HF_ENDPOINT, and proxies on the way"
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9][\w./-]{0,199}(?<![./])", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"(?=.*[0-9])(?=.*[a-f])[0-9a-f]{7,39}")
"""What is taken for the first digits of a commit: a date as a tag has no letter."""
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_GGUF_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
_MAX_FILES = 20_000
_MAX_NAME = 250
_MAX_SIZE = 1 << 50
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class ShortName:
    """A well-known open model that this engine runs, and what is known about it."""

    name: str
    repository: str
    parameters: str
    size: str
    """About how large its files are."""
    licence: str


_APACHE = "Apache-2.0"
SHORT_NAMES = (
    ShortName("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "135M", "0.3 GB", _APACHE),
    ShortName("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "362M", "0.7 GB", _APACHE),
    ShortName("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", "3.4 GB", _APACHE),
    ShortName("qwen3:0.6b", "Qwen/Qwen3-0.6B", "0.6B", "1.5 GB", _APACHE),
    ShortName("qwen3:1.7b", "Qwen/Qwen3-1.7B", "1.7B", "4.1 GB", _APACHE),
    ShortName("qwen3:4b", "Qwen/Qwen3-4B", "4.0B", "8.0 GB", _APACHE),
    ShortName("qwen3:8b", "Qwen/Qwen3-8B", "8.2B", "16.4 GB", _APACHE),
    ShortName("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B", "30.5B", "61 GB", _APACHE),
    ShortName("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "1.0 GB", _APACHE),
    ShortName("qwen2.5:1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "1.5B", "3.1 GB", _APACHE),
    ShortName("qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct", "7.6B", "15.2 GB", _APACHE),
    ShortName("tinyllama:1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.1B", "2.2 GB", _APACHE),
    ShortName(
        "llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct", "1.2B", "2.5 GB", "Llama 3.2, gated"
    ),
    ShortName(
        "llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct", "3.2B", "6.4 GB", "Llama 3.2, gated"
    ),
    ShortName("mistral:7b", "mistralai/Mistral-7B-Instruct-v0.3", "7.2B", "14.5 GB", _APACHE),
    ShortName("mixtral:8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "46.7B", "93 GB", _APACHE),
    ShortName("olmoe:7b-a1b", "allenai/OLMoE-1B-7B-0924-Instruct", "6.9B", "13.8 GB", _APACHE),
)
"""By family, the smallest first: it is the one that the name of the family stands for."""


def search_short_names(text: str) -> list[ShortName]:
    """Return the rows whose short name or repository contains a text, in any case."""
    wanted = text.casefold()
    return [row for row in SHORT_NAMES if wanted in f"{row.name} {row.repository}".casefold()]


def _find_short_name(text: str) -> ShortName | None:
    wanted = text.casefold()
    return next((r for r in SHORT_NAMES if wanted in (r.name, r.name.partition(":")[0])), None)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub: its repository, and the revision if the user named one."""

    repository: str
    revision: str | None = None

    @property
    def wanted_revision(self) -> str:
        """The branch, tag or commit to download."""
        return self.revision or _DEFAULT_REVISION

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a whole commit, which never moves."""
        return is_commit(self.wanted_revision)

    def __str__(self) -> str:
        """Return ``ORG/NAME`` or ``ORG/NAME@REVISION``."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def is_commit(text: str) -> bool:
    """Tell whether a text is a whole commit: 40 hexadecimal digits."""
    return _COMMIT.fullmatch(text) is not None


def parse_hub_name(text: str) -> HubName | None:
    """Return the model that a text names; None for a text that can only be a path.

    Raises:
        UsageError: for ``hf:`` before something else, and for an impossible revision.
    """
    wanted = text.removeprefix(HUB_PREFIX)
    label, mark, revision = wanted.partition("@")
    row = _find_short_name(label)
    repository = label if row is None else row.repository
    is_forced = wanted != text
    if not _is_repository(repository, needs_owner=not is_forced):
        if not is_forced:
            return None
        raise UsageError(
            f"{to_single_line(text[:100])!r} does not name a model of a hub",
            hint="write it as hf:ORG/NAME or hf:ORG/NAME@REVISION",
        )
    if mark and not _REVISION.fullmatch(revision):
        raise UsageError(
            f"{to_single_line(revision[:100])!r} cannot be a revision of {repository}",
            hint="name a branch, a tag or a commit after the @",
        )
    return HubName(repository, revision if mark else None)


def _is_repository(label: str, *, needs_owner: bool) -> bool:
    parts = label.split("/")
    return (
        is_hub_name(label)
        and (len(parts) == 2 or not needs_owner)
        and "--" not in label
        and ".." not in label
        and not any(part.endswith((".", "-", ".git")) for part in parts)
    )


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the hub lists it."""

    name: str
    """Its path in the repository: relative, checked."""
    size: int
    digest: Digest | None
    """Of a large file (Git LFS); None for one that Git itself stores."""
    git_id: str | None
    """The id of the Git object, of a file that Git stores; hexadecimal."""


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a repository at one commit."""

    name: HubName
    commit: str
    files: tuple[HubFile, ...]

    def find(self, name: str) -> HubFile | None:
        """Return the file of this name."""
        return next((file for file in self.files if file.name == name), None)


class _LfsEntry(msgspec.Struct):
    sha256: str
    size: int


class _ListedFile(msgspec.Struct, rename={"git_id": "blobId", "name": "rfilename"}):
    name: str
    size: int | None = None
    git_id: str | None = None
    lfs: _LfsEntry | None = None


class _RepositoryAnswer(msgspec.Struct):
    sha: str
    siblings: list[_ListedFile] = []


def parse_listing(data: bytes, name: HubName) -> HubListing:
    """Check what a hub says about a repository; ``data`` is its JSON answer.

    A file with a name that may not be written is left out: it is none of a base.

    Raises:
        RegistryError: when it is malformed, or another commit than the wanted one.
    """
    try:
        answer = msgspec.json.decode(data, type=_RepositoryAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"the answer about {name.repository} is not that of a hub",
            hint=ENDPOINT_HINT,
        ) from error
    if not is_commit(answer.sha) or len(answer.siblings) > _MAX_FILES:
        raise RegistryError(
            f"the answer about {name.repository} names no commit, or too many files",
            hint=ENDPOINT_HINT,
        )
    _require_wanted_commit(answer.sha, name)
    usable = (file for file in answer.siblings if _may_be_written(file.name))
    return HubListing(name, answer.sha, tuple(_check_file(file, name) for file in usable))


def _require_wanted_commit(commit: str, name: HubName) -> None:
    """Require the commit that the user named, whole or by its first digits."""
    wanted = name.wanted_revision
    if (name.is_pinned or _SHORT_COMMIT.fullmatch(wanted)) and not commit.startswith(wanted):
        raise RegistryError(
            f"the hub answers with commit {commit[:12]} of {name.repository}, not {wanted[:12]}",
            hint=ENDPOINT_HINT if name.is_pinned else "name the whole commit after the @",
        )


def _may_be_written(name: str) -> bool:
    """Tell whether the name of a file is a relative path on every system."""
    parts = name.split("/")
    return (
        len(name) <= _MAX_NAME
        and name.isprintable()
        and "\\" not in name
        and ":" not in parts[0]
        and not any(part in {"", ".", ".."} for part in parts)
    )


def _check_file(file: _ListedFile, name: HubName) -> HubFile:
    size = file.size if file.lfs is None else file.lfs.size
    if size is None or not 0 <= size <= _MAX_SIZE:
        raise _build_listing_error(f"the size of {file.name} is not stated", name)
    try:
        digest = None if file.lfs is None else Digest.parse(f"sha256:{file.lfs.sha256}")
    except ExpertError as error:
        raise _build_listing_error(f"the digest of {file.name} is malformed", name) from error
    return HubFile(file.name, size, digest, file.git_id if file.lfs is None else None)


def _build_listing_error(problem: str, name: HubName) -> RegistryError:
    return RegistryError(f"the list of files of {name.repository}: {problem}", hint=ENDPOINT_HINT)


def choose_files(listing: HubListing, pattern: str | None = None) -> tuple[HubFile, ...]:
    """Return the files that make a base, small ones first; or the one GGUF file of ``pattern``.

    Raises:
        UsageError: when a GGUF file must be chosen, or the pattern picks none or too much.
        IncompatibleError: when the repository has no weights that may be read, or is no base.
    """
    weights = _choose_weights(listing) if pattern is None else _match_files(listing, pattern)
    if weights[0].name.endswith(".gguf"):
        return weights
    required = []
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        file = listing.find(name)
        if file is None:
            raise IncompatibleError(
                f"{listing.name.repository} has no {name}, so it is no base that can be used",
                hint="a base has config.json, tokenizer.json and safetensors"
                + ("; this looks like an adapter" if listing.find(_ADAPTER_CONFIG) else ""),
            )
        required.append(file)
    index = listing.find(INDEX_FILE)
    has_shards = index is not None and any(_SHARD.fullmatch(file.name) for file in weights)
    optional = [
        file
        for name in OPTIONAL_FILES
        if (file := listing.find(name)) is not None and (name != INDEX_FILE or has_shards)
    ]
    return (*required, *optional, *weights)


_ADAPTER_CONFIG = "adapter_config.json"


def _choose_weights(listing: HubListing) -> tuple[HubFile, ...]:
    shards = [file for file in listing.files if _SHARD.fullmatch(file.name)]
    if shards and listing.find(INDEX_FILE) is not None:
        return _require_all_shards(shards, listing)
    whole = listing.find(WEIGHTS_FILE)
    if whole is not None:
        return (whole,)
    repository = listing.name.repository
    names = [file.name for file in listing.files]
    if any(name.endswith(".gguf") for name in names):
        raise UsageError(
            f"{repository} has only GGUF files: {_join_names(names, '.gguf')}",
            hint="choose one with `--file PATTERN`, such as --file '*Q4_K_M.gguf'",
        )
    if any(name.endswith(_PICKLES) for name in names):
        raise IncompatibleError(
            f"{repository} has its weights only as pickles, which are never opened",
            hint="look for a revision or a copy of the model with model.safetensors",
        )
    raise IncompatibleError(
        f"{repository} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}",
        hint="a base has config.json, tokenizer.json and safetensors",
    )


def _require_all_shards(shards: list[HubFile], listing: HubListing) -> tuple[HubFile, ...]:
    """Return the shards in order; their names say which there are.

    The first is 1, or 0 where the names state the last number, not how many there are (gpt-oss).
    """
    found = sorted(shards, key=lambda file: file.name)
    matches = [match for file in found if (match := _SHARD.fullmatch(file.name))]
    first = min(int(match[1]) for match in matches)
    numbers, last = [int(match[1]) for match in matches], {int(match[2]) for match in matches}
    if first > 1 or numbers != list(range(first, first + len(found))) or last != {numbers[-1]}:
        raise IncompatibleError(
            f"{listing.name.repository} lacks some of its weight files: it has {len(found)}, the "
            f"last is {found[-1].name}",
            hint="try another revision: ORG/NAME@REVISION",
        )
    return tuple(found)


def match_weights(names: Iterable[str], pattern: str) -> list[str]:
    """Return the weight files whose path or last part matches a pattern, sorted."""
    ends = (".gguf", ".safetensors")
    usable = (name for name in names if name.endswith(ends))
    wanted = ((name, name.rpartition("/")[2]) for name in usable)
    return sorted(n for n, last in wanted if fnmatchcase(n, pattern) or fnmatchcase(last, pattern))


def require_one_form(matched: list[str], pattern: str) -> None:
    """Require that what a pattern matches is one GGUF file, or files that may be a base's weights.

    Raises:
        IncompatibleError: when it is a GGUF file in several parts.
        UsageError: when it is more than one form of the weights.
    """
    shown, found = to_single_line(pattern[:80]), _join_names(matched, "")
    if all(_is_gguf_part(name) for name in matched):
        raise IncompatibleError(
            f"--file {shown!r} matches a GGUF file in parts, which is not supported: {found}",
            hint="choose a file that is whole; or download all parts, and merge them: "
            "`llama-gguf-split --merge FIRST.gguf MODEL.gguf`",
        )
    is_one_gguf = len(matched) == 1 and matched[0].endswith(".gguf")
    if not is_one_gguf and matched != [WEIGHTS_FILE] and not all(map(_SHARD.fullmatch, matched)):
        count = "1 file" if len(matched) == 1 else f"{len(matched)} files"
        raise UsageError(
            f"--file {shown!r} matches {count}: {found}",
            hint="name one GGUF file; of safetensors only model.safetensors or all its shards "
            "can be used, which are the default",
        )


def _is_gguf_part(name: str) -> bool:
    """Tell whether a file is one of several that make a GGUF file, by its name."""
    match = _GGUF_PART.search(name)
    return match is not None and int(match[1]) > 1


def _match_files(listing: HubListing, pattern: str) -> tuple[HubFile, ...]:
    """Return the weight files that match a pattern: one GGUF file, or all of a base."""
    names, repository = [file.name for file in listing.files], listing.name.repository
    matched = match_weights(names, pattern)
    if not matched:
        kinds = _join_names(names, (".gguf", ".safetensors")) or "no weights that may be read"
        others = any(fnmatchcase(name.rpartition("/")[2], pattern) for name in names)
        why = "names no safetensors and no GGUF" if others else "matches no file"
        shown = to_single_line(pattern[:80])
        raise UsageError(f"--file {shown!r} {why} of {repository}", hint=f"it has {kinds}")
    require_one_form(matched, pattern)
    files = [file for name in matched if (file := listing.find(name)) is not None]
    if not _SHARD.fullmatch(matched[0]):
        return tuple(files)
    if len(matched) < sum(1 for name in names if _SHARD.fullmatch(name)) or INDEX_FILE not in names:
        raise UsageError(
            f"--file {to_single_line(pattern[:80])!r} matches {len(matched)} of the shards of "
            f"{repository}, which are used only together and with their index",
            hint="leave out --file",
        )
    return _require_all_shards(files, listing)


def _join_names(names: list[str], suffix: str | tuple[str, ...]) -> str:
    kept = sorted(name for name in names if name.endswith(suffix))
    more = f" and {len(kept) - _MAX_NAMED} more" if len(kept) > _MAX_NAMED else ""
    return ", ".join(kept[:_MAX_NAMED]) + more


def build_unknown_model_error(name: HubName, endpoint: str) -> NotFoundError:
    """Return the error for a repository that a hub does not have, or does not show."""
    return NotFoundError(
        f"{endpoint} has no model {name.repository}, or shows it only to those who may read it",
        hint="check the spelling; for a private model set HF_TOKEN; `expertctl base search` lists "
        "short names; an expert is installed by `expertctl install`",
    )
