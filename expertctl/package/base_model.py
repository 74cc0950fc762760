"""What a base model is, read from its Hugging Face directory without torch.

A base is named by three digests: ``arch`` (the configuration that the decoder runs on, with the
names and shapes of all tensors), ``weights`` (every tensor's bytes; a tied head counts once) and
the tokenizer: by the bytes of tokenizer.json (version 1) and by its canonical form (version 2, see
`expertctl.package.tokenizer_form`). Only safetensors are read. A *foreign* base is one that
our decoder does not run: its whole configuration and every tensor of its files count.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expertctl.digest import CHUNK, Digest, Progress, no_progress
from expertctl.errors import InvalidPackageError
from expertctl.package.base_tensors import (
    StoredTensor,
    base_tensors,
    find_file,
    foreign_tensors,
)
from expertctl.package.foreign_config import ForeignConfig, read_base_config
from expertctl.package.hashing_threads import hashing_threads
from expertctl.package.model_config import ModelConfig
from expertctl.package.tokenizer_form import MAX_TOKENIZER_BYTES, tokenizer_digest
from expertctl.schema.strict_json import JsonObject, canonical, read_bounded

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """A base by name and content; ``weights`` is ``None`` when they were not read."""

    name: str
    revision: str | None
    arch: Digest
    weights: Digest | None
    tokenizer: Digest
    """Version 1: of the file, or of one with the same canonical form that was added before."""
    canonical_tokenizer: Digest | None = field(default=None, compare=False)
    """Version 2; ``None`` where the file cannot be read any more. It follows from the file."""

    def tokenizer_of(self, version: int) -> Digest | None:
        """Return the digest of the tokenizer that a package of some version states."""
        return self.tokenizer if version == 1 else self.canonical_tokenizer


def is_saved_again(known: BaseIdentity, found: BaseIdentity) -> bool:
    """Tell whether two bases differ at most in the form in which the tokenizer was saved."""
    canonical_form = known.canonical_tokenizer
    same_form = canonical_form is not None and canonical_form == found.canonical_tokenizer
    same_tokenizer = known.tokenizer == found.tokenizer or same_form
    return same_tokenizer and replace(found, tokenizer=known.tokenizer) == known


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What checking an adapter needs of a base: its identity, (out, in) of its linear layers."""

    identity: BaseIdentity
    shapes: Mapping[str, tuple[int, int]]
    foreign: bool = False
    """Whether only ``run --engine transformers`` runs it."""
    directory: Path | None = field(default=None, compare=False)
    """Where its files are, for what is compared with them; ``None``: nowhere here."""


@dataclass(frozen=True, slots=True)
class BaseHeaders:
    """What the small files and the headers of a base say; none of its weights was read."""

    config: JsonObject
    tensors: Mapping[str, StoredTensor]
    """Sorted by name; a tied head that is stored too is not among them."""
    shapes: Mapping[str, tuple[int, int]]
    foreign: bool


def read_headers(directory: Path) -> BaseHeaders:
    """Read what a base is without its weights.

    Raises:
        NotFoundError: when the directory or one of its files is missing.
        IncompatibleError: when no engine supports such a model.
        InvalidPackageError: when it is not a base that can be read.
    """
    config = read_base_config(directory)
    match config:
        case ModelConfig():
            stored = base_tensors(directory, config)
            tensors = {name: stored[name] for name in sorted(config.tensor_shapes())}
            return BaseHeaders(config.to_json(), tensors, config.linear_shapes(), foreign=False)
        case ForeignConfig():
            tensors = foreign_tensors(directory)
            shapes = config.linear_shapes({n: t.info.shape for n, t in tensors.items()})
            return BaseHeaders(config.to_json(), tensors, shapes, foreign=True)


def read_base(
    directory: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> BaseFacts:
    """Read a whole base and name it; ``name`` defaults to the directory's.

    Raises:
        NotFoundError: when the directory or one of its files is missing.
        IncompatibleError: when no engine supports such a model.
        InvalidPackageError: when it is not a base that can be read.
    """
    headers = read_headers(directory)
    tokenizer = _read_tokenizer(directory, progress)
    identity = BaseIdentity(
        name=name or directory.resolve().name,
        revision=revision,
        arch=_arch(headers),
        weights=_weights(headers.tensors, progress),
        tokenizer=Digest.of(tokenizer),
        canonical_tokenizer=tokenizer_digest(tokenizer, what=TOKENIZER_FILE),
    )
    return BaseFacts(identity, headers.shapes, headers.foreign, directory)


def weights_digest(tensors: Mapping[str, StoredTensor], digests: Mapping[str, str]) -> Digest:
    """Return the digest of a base's weights, over name, dtype and hex sha256 of each tensor."""
    rows: list[list[Any]] = [[n, tensors[n].info.dtype, digests[n]] for n in sorted(digests)]
    return Digest.of(canonical(rows))


def _arch(headers: BaseHeaders) -> Digest:
    shapes = [[name, list(tensor.info.shape)] for name, tensor in headers.tensors.items()]
    return Digest.of(canonical({"config": headers.config, "tensors": shapes}))


def _read_tokenizer(directory: Path, progress: Progress) -> bytes:
    data = read_bounded(find_file(directory, TOKENIZER_FILE), max_bytes=MAX_TOKENIZER_BYTES)
    progress(len(data))
    return data


def _weights(tensors: Mapping[str, StoredTensor], progress: Progress) -> Digest:
    """Hash every tensor, in threads: hashing and reading both leave the interpreter free."""
    digests: dict[str, str] = {}
    with hashing_threads() as (pool, go_on):
        tasks = {pool.submit(_hash_tensor, tensor, go_on): n for n, tensor in tensors.items()}
        for task in as_completed(tasks):
            digests[tasks[task]] = task.result()
            progress(tensors[tasks[task]].size)
    return weights_digest(tensors, digests)


def _hash_tensor(tensor: StoredTensor, go_on: Progress) -> str:
    hasher = hashlib.sha256()

    def use(chunk: memoryview) -> None:
        go_on(len(chunk))
        hasher.update(chunk)

    _read_tensor(tensor, use)
    return hasher.hexdigest()


def _read_tensor(tensor: StoredTensor, use: Callable[[memoryview], None]) -> None:
    buffer = bytearray(min(CHUNK, tensor.size))
    view, left = memoryview(buffer), tensor.size
    with tensor.path.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        while left:
            count = stream.readinto(view[: min(len(view), left)])
            if not count:
                raise InvalidPackageError(str(tensor.path), ["the file is cut short"])
            use(view[:count])
            left -= count
